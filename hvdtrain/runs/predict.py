"""`predict` on every rank: predictions of a run.

Every rank predicts its part of each batch, and the primary writes all of them in the order of the samples. Each rank
calls the model on equally many samples, so that predictions do not depend on the number of ranks.
"""

import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.backends.select import backend_for
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.run import Config
from hvdtrain.data.pipeline import ReadOptions, SourceEvaluation
from hvdtrain.data.prediction import PredictionSamples
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.run_data import gather_along_replicas
from hvdtrain.runs.trainers import trained_model
from hvdtrain.runtime.session import Session
from hvdtrain.training.step.batches import inputs_for

Format = Literal["csv", "jsonl"]
DIGITS = 6
"""Rounded to, so that the last bits of a processor's arithmetic do not show."""


def readable_outputs(outputs: Any, description: RunDescription) -> Any:
    """Return probabilities [samples, classes] where the model has classes, else the outputs as they are.

    They are of two classes for a binary model with one output.
    """
    if not isinstance(outputs, np.ndarray) or description.outputs == "values":
        return outputs
    array = outputs.astype(np.float64)
    if description.outputs == "logits":
        return softmax(array).astype(np.float32)
    if description.outputs == "binary_logits":
        array = 1.0 / (1.0 + np.exp(-np.clip(array, -700, 700)))
    if description.outputs.startswith("binary") and (array.ndim == 1 or array.shape[-1] == 1):
        of_one = array.reshape(len(array), -1)[:, :1]
        array = np.concatenate([1.0 - of_one, of_one], axis=1)
    return array.astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities [..., classes] of `logits`."""
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    total: np.ndarray = shares / shares.sum(axis=-1, keepdims=True)
    return total


def has_one_class(outputs: Any, description: RunDescription) -> bool:
    """Whether each row of readable `outputs` is a distribution over classes, of which one is predicted."""
    several_labels = description.outputs.startswith("binary") and outputs_width(outputs) != 2
    return description.outputs != "values" and outputs_width(outputs) > 1 and not several_labels


def outputs_width(outputs: Any) -> int:
    """Return the length of rows [samples, n]; 0 for anything else."""
    return outputs.shape[1] if isinstance(outputs, np.ndarray) and outputs.ndim == 2 else 0


@dataclass(frozen=True)
class RowFormat:
    """Format of the predictions."""

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
            ids: paths or rows of the samples.
            outputs: readable outputs [samples, …].
            errors: description of each sample's error, or "".

        Raises:
            ConfigError: outputs that do not fit into a row of a CSV file, or an option without effect.
        """
        records = [self._record(outputs, place) for place in range(len(ids))]
        if self._format.form == "jsonl":
            rows = [
                {self._id_name: name, **({"error": error} if error else record)}
                for name, record, error in zip(ids, records, errors, strict=True)
            ]
            return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        flat = [_flat(record) for record in records]
        if not self._columns:
            self._columns = list(flat[0])
            writer.writerow([self._id_name, *self._columns, *(["error"] if self._errors else [])])
        for name, row, error in zip(ids, flat, errors, strict=True):
            values = [""] * len(row) if error else [_cell(value) for value in row.values()]
            writer.writerow([name, *values, *([error] if self._errors else [])])
        return text.getvalue()

    def _record(self, outputs: Any, place: int) -> dict[str, Any]:
        """Return the prediction for one sample as an object of JSON."""
        description, chosen = self._description, self._format
        count = 0 if description.outputs == "values" else description.classes or 2
        names = [description.name_of(label) for label in range(count)]
        if has_one_class(outputs, description):
            # Rounded first: a tie in the last bits is resolved by the order of the classes.
            rounded = [_rounded(share) for share in outputs[place]]
            order = sorted(range(len(rounded)), key=lambda label: -(rounded[label] or 0.0))
            top = [{"class": names[label], "probability": rounded[label]} for label in order[: chosen.top]]
            record: dict[str, Any] = {**top[0], **({"top": top} if chosen.top > 1 else {})}
            if chosen.all_probabilities:
                record["probabilities"] = dict(zip(names, rounded, strict=True))
            return record
        if chosen.top > 1:
            raise ConfigError("--top is for classes, of which one is predicted: this model has none. Leave it out.")
        if description.outputs != "values" and outputs_width(outputs):
            return {f"probability:{name}": _rounded(p) for name, p in zip(names, outputs[place], strict=True)}
        if chosen.all_probabilities:
            raise ConfigError("--probabilities is for classes: this model has none. Leave it out.")
        parts = outputs if isinstance(outputs, dict) else {"value": outputs}
        if isinstance(outputs, list | tuple):
            parts = {f"value_{number}": part for number, part in enumerate(outputs)}
        return {name: _nested(array[place]) for name, array in parts.items()}


def _flat(record: dict[str, Any]) -> dict[str, Any]:
    """Return the cells of a record by column."""
    cells: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            cells |= {f"probability:{each}": share for each, share in value.items()}
        elif isinstance(value, list) and value and isinstance(value[0], dict):  # the first one has its own cells
            for number, each in enumerate(value[1:], 2):
                cells |= {f"{part}_{number}": cell for part, cell in each.items()}
        elif isinstance(value, list):
            if value and isinstance(value[0], list):
                raise ConfigError(
                    f"The model returns an array {list(np.shape(value))} for each sample, which is not a row of a CSV "
                    "file: use --format jsonl."
                )
            cells |= {f"{name}_{number}": cell for number, cell in enumerate(value)}
        else:
            cells[name] = value
    return cells


def _rounded(value: Any) -> float | None:
    number = float(f"{float(value):.{DIGITS}g}")
    return number if np.isfinite(number) else None


def _nested(value: np.ndarray) -> Any:
    """Return an array as numbers in lists, or the only number."""
    if value.size == 1:
        return _rounded(value.reshape(()))
    rounded: Any = np.vectorize(_rounded, otypes=[object])(value).tolist()
    return rounded


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.{DIGITS}g}" if isinstance(value, float) else str(value)


def predict(
    session: Session,
    config: Config,
    folder: RunFolder,
    description: RunDescription,
    samples: PredictionSamples,
    write: Callable[[str], None],
    *,
    row_format: RowFormat,
    checkpoint: str = "newest",
    batch_size: int = 64,
    tolerated: int = 0,
) -> int:
    """Predict `samples`, the same on all ranks, and return how many could not be read. Collective.

    Args:
        session: this rank's part in the job.
        config: of the run.
        folder: of the run.
        description: of the run.
        samples: to predict.
        write: receives the lines on rank 0, batch after batch.
        row_format: how predictions are written.
        checkpoint: `newest`, `best`, or the number of a step.
        batch_size: samples per step on each rank.
        tolerated: samples that may be unreadable: their rows say why.

    Raises:
        CheckpointError: there is no such checkpoint.
        DataError: a sample cannot be read, or ranks see different samples.
    """
    backend = backend_for(session)
    prints = gather(backend, samples.source.fingerprint().hex(), timeout=None)
    other = next((rank for rank, theirs in enumerate(prints) if theirs != prints[0]), None)
    if other is not None:
        raise DataError(
            f"What rank {other} is to predict is not what rank 0 is to: all ranks must see the same files. Use one "
            "rank, or a file system that they share."
        )
    batches = SourceEvaluation(
        samples.source,
        batch=batch_size * backend.data_parallel.size,
        index=backend.process,
        size=backend.processes,
        read_options=ReadOptions(finish=samples.finish, tolerated=tolerated),
        gather=gather_along_replicas(backend),
    )
    writer = RowWriter(description, row_format, samples.id_name, errors=tolerated > 0)
    first = next(iter(batches))
    with trained_model(config, description, folder.checkpoints, checkpoint, backend, first) as model:
        number = 0
        for outputs, errors in _outputs(model, batches, backend, batch_size):
            ids = [samples.identify(place) for place in range(number, number + len(errors))]
            if backend.primary:
                write(writer.lines(ids, readable_outputs(outputs, description), errors))
            number += len(errors)
    return len(batches.bad.found)


def _outputs(
    model: Any, batches: SourceEvaluation, backend: Backend, batch_size: int
) -> Iterator[tuple[Any, list[str]]]:
    """Yield the outputs of each global batch, and what is wrong with each of its samples."""
    call = tf.function(lambda inputs: model(inputs, training=False), autograph=False, reduce_retracing=True)

    @tf.function(autograph=False, reduce_retracing=True)
    def gathered(parts: Any) -> Any:
        """Return the outputs of all ranks, in their order."""
        flat = [
            backend.data_parallel.all_gather(tensor, name=f"prediction/output{place}")
            for place, tensor in enumerate(tf.nest.flatten(parts))
        ]
        return tf.nest.pack_sequence_as(parts, flat)

    begin = 0
    for batch in batches:
        outputs = call(_filled(inputs_for(model, batch.inputs), batch_size))
        mine = int(batch.has_samples) * len(tf.nest.flatten(batch.inputs)[0])
        parts = tf.nest.map_structure(lambda tensor, mine=mine: tensor[:mine], outputs)
        whole = tf.nest.map_structure(lambda tensor: tensor.numpy(), gathered(parts))
        if batches.bad.tolerated:
            batches.bad.share()
        end = begin + int(batch.global_samples)
        yield whole, [batches.bad.found.get(number, "") for number in range(begin, end)]
        begin = end


def _filled(inputs: Any, size: int) -> Any:
    """Repeat the last sample up to `size` samples: the model is compiled once, and every rank computes the same."""
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, tf.minimum(tf.range(size), len(tensor) - 1)), inputs)
