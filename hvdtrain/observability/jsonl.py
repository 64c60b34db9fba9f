"""metrics.jsonl: one JSON object for each logged step and each evaluation."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.config.errors import DataError
from hvdtrain.observability.events import BaseObserver, EvaluationRecord, RunInfo, StepRecord
from hvdtrain.observability.summary import json_safe, replace_file


class JsonlWriter(BaseObserver):
    """Writes each record as a line, out of the process's hands as soon as it is written.

    A resumed run goes on in the same file: records later than the step it resumes from are cut off, since
    those steps are taken again. A run that starts at step 0 starts the file anew.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._stream: TextIO | None = None

    def on_start(self, info: RunInfo) -> None:
        """Open the file, with what it holds up to the step this run resumes from."""
        kept = records_until(self._path, info.start_step)
        replace_file(self._path, "".join(map(_line, kept)))
        self._stream = self._path.open("a", encoding="utf-8")

    def on_step(self, record: StepRecord) -> None:
        """Write a line of kind ``step``."""
        self._write(flat_record("step", record))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Write a line of kind ``evaluation``."""
        self._write(flat_record("evaluation", record))

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        assert self._stream is not None, "on_start opens the file"
        self._stream.write(_line(record))
        self._stream.flush()


def flat_record(kind: str, record: StepRecord | EvaluationRecord) -> dict[str, Any]:
    """Return `record` as one level of fields; a metric called like a field is named ``metric_…``."""
    own = {"kind": kind} | {field.name: getattr(record, field.name) for field in fields(record)}
    metrics = own.pop("metrics")
    return own | {f"metric_{name}" if name in own else name: value for name, value in metrics.items()}


def records_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the records in `path` of steps up to and including `step`; none where there is no file."""
    if step == 0 or not path.exists():
        return []
    return [record for record in read_metrics(path) if record["step"] <= step]


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl.

    A last line without its end, as a killed process leaves it, is left out. Values that were NaN or infinite
    are None.

    Raises:
        DataError: for any other line that is not a JSON object.
    """
    lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    return list(_parsed(path, (line for line in lines if line.endswith("\n"))))


def _parsed(path: str | Path, lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["kind"], record["step"]
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path}, line {number}: not a record of a training run: {line.strip()[:80]}") from None
        yield record


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(json_safe(record), allow_nan=False) + "\n"
