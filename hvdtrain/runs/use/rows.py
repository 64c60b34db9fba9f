"""Predictions as rows of a CSV file or as JSON objects."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from hvdtrain.config.errors import ConfigError
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.use.outputs import has_one_class, outputs_width

Format = Literal["csv", "jsonl"]
DIGITS = 6
"""Rounded to, so that the last bits of a processor's arithmetic do not show."""


@dataclass(frozen=True)
class RowFormat:
    """How predictions are written."""

    form: Format = "csv"
    top: int = 1
    """Number of the most probable classes."""
    all_probabilities: bool = False
    """Add the probability of every class."""


class RowWriter:
    """Formats predictions.

    Args:
        description: of the run.
        row_format: how they are written.
        id_name: what identifies a sample.
        errors: whether samples may have an error in place of a prediction.
    """

    def __init__(self, description: RunDescription, row_format: RowFormat, id_name: str, *, errors: bool) -> None:
        self._description = description
        self._format = row_format
        self._id_name = id_name
        self._errors = errors
        self._columns: list[str] = []

    def lines(self, ids: Sequence[str | int], outputs: Any, errors: Sequence[str]) -> str:
        """Return the lines of some samples; the first ones of a CSV file follow its header.

        Args:
            ids: of the samples.
            outputs: readable outputs [samples, …].
            errors: what is wrong with each sample; "" for nothing.

        Raises:
            ConfigError: outputs that do not fit into a row of a CSV file, or an option without effect.
        """
        records = [self._record(outputs, place) for place in range(len(ids))]
        if self._format.form == "jsonl":
            return "".join(self._json(*of) for of in zip(ids, records, errors, strict=True))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if not self._columns:
            self._columns = list(records[0])
            writer.writerow([self._id_name, *self._columns, *(["error"] if self._errors else [])])
        for name, record, error in zip(ids, records, errors, strict=True):
            values = [""] * len(record) if error else [_cell(value) for value in record.values()]
            writer.writerow([name, *values, *([error] if self._errors else [])])
        return text.getvalue()

    def _json(self, name: str | int, record: dict[str, Any], error: str) -> str:
        values = {self._id_name: name, **({"error": error} if error else record)}
        return json.dumps(values, ensure_ascii=False) + "\n"

    def _record(self, outputs: Any, place: int) -> dict[str, Any]:
        """Return the prediction for one sample by column."""
        if has_one_class(outputs, self._description):
            return self._of_classes(outputs[place])
        if self._format.top > 1:
            raise ConfigError("--top is for classes, of which one is predicted: this model has none. Leave it out.")
        if self._description.outputs != "values" and outputs_width(outputs):
            return {f"probability:{name}": _rounded(p) for name, p in zip(self._names(), outputs[place], strict=True)}
        if self._format.all_probabilities:
            raise ConfigError("--probabilities is for classes: this model has none. Leave it out.")
        return self._of_values(outputs, place)

    def _of_classes(self, shares: np.ndarray) -> dict[str, Any]:
        # Rounded first: a tie in the last bits is resolved by the order of the classes.
        rounded = [_rounded(share) for share in shares]
        order = sorted(range(len(rounded)), key=lambda label: -(rounded[label] or 0.0))
        best = [(self._name(label), rounded[label]) for label in order[: self._format.top]]
        if self._format.form == "jsonl":
            record: dict[str, Any] = {"class": best[0][0], "probability": best[0][1]}
            if self._format.top > 1:
                record["top"] = [{"class": name, "probability": share} for name, share in best]
            if self._format.all_probabilities:
                record["probabilities"] = dict(zip(self._names(), rounded, strict=True))
            return record
        record = {}
        for number, (name, share) in enumerate(best, 1):
            end = "" if number == 1 else f"_{number}"
            record |= {f"class{end}": name, f"probability{end}": share}
        if self._format.all_probabilities:
            record |= {f"probability:{name}": share for name, share in zip(self._names(), rounded, strict=True)}
        return record

    def _of_values(self, outputs: Any, place: int) -> dict[str, Any]:
        parts = outputs if isinstance(outputs, dict) else {"value": outputs}
        if isinstance(outputs, list | tuple):
            parts = {f"value_{number}": part for number, part in enumerate(outputs)}
        record: dict[str, Any] = {}
        for name, array in parts.items():
            value = array[place]
            if value.size == 1:
                record[name] = _rounded(value.reshape(()))
            elif self._format.form == "jsonl":
                record[name] = _nested(value)
            elif value.ndim == 1:
                record |= {f"{name}_{number}": _rounded(entry) for number, entry in enumerate(value)}
            else:
                raise ConfigError(
                    f"The model returns an array {list(value.shape)} for each sample, which is no row of a CSV file: "
                    "use --format jsonl."
                )
        return record

    def _names(self) -> list[str]:
        count = self._description.classes or 2
        return [self._name(label) for label in range(count)]

    def _name(self, label: int) -> str:
        return self._description.name_of(label)


def _rounded(value: Any) -> float | None:
    number = float(f"{float(value):.{DIGITS}g}")
    return number if np.isfinite(number) else None


def _nested(value: np.ndarray) -> Any:
    return _rounded(value) if value.ndim == 0 else [_nested(part) for part in value]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)
