"""Training on each rank's own shard of the data (`shard="rank"`), with the same number of steps on every rank.

A step trains on one batch of every rank. A rank with fewer batches continues with placeholders, which do not count,
until the last rank is done; so which samples form a step depends on how they were divided.
"""

import base64
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch, samples_in
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.dataset_batches import DatasetTraining
from hvdtrain.data.streams.python_batches import GeneratorTraining

NOTE = (
    'note: shard="rank": each rank trains on its own data. Which samples form a step depends on the number of ranks, '
    "and training can be resumed on this number only."
)


@dataclass(frozen=True)
class Agreed:
    """Steps and batch size that fit the shards of all ranks."""

    steps: int
    """Steps of a pass: as many as the rank with the most has."""
    rows: int
    """Samples of a rank's full batch."""
    placeholder: Batch
    """A sample that does not count, for steps in which this rank has none."""


class RankTraining:
    """Training on this rank's own batches.

    Args:
        mine: this rank's batches; None: it has none.
        agreed: steps and batch size of all ranks.
        size: number of ranks.
    """

    notes = (NOTE,)
    pass_steps: int | None = None

    def __init__(self, mine: TrainingData | None, agreed: Agreed, size: int) -> None:
        self.batch = agreed.rows * size
        self.steps_per_epoch = agreed.steps
        self.remedy = "" if mine is None else mine.remedy
        self.source = getattr(mine, "source", None)
        """The samples of this rank, if they are in memory."""
        self.first_epoch = 0
        """The training's epoch in which streams are begun."""
        self._mine = mine
        self._agreed = agreed

    def settle(self) -> None:
        """Wait until nothing is read ahead any more."""
        if isinstance(self._mine, GeneratorTraining):
            self._mine.settle()

    def batches(self, start_step: int) -> Iterator[Batch]:
        if isinstance(self._mine, DatasetTraining | GeneratorTraining):
            self._mine.first_epoch = self.first_epoch
        epoch, within = divmod(start_step, self.steps_per_epoch)
        held = 0 if self._mine is None else self._mine.steps_per_epoch
        if isinstance(self._mine, DatasetTraining | GeneratorTraining) and self._mine.varies:
            for own in self._mine.epochs(epoch, min(within, held)):
                for _ in range(within, self.steps_per_epoch):
                    batch = next(own, None)
                    yield self._none() if batch is None else counted_by_weight(batch, self._agreed.rows, self.batch)
                within = 0
                if next(own, None) is not None:
                    warnings.warn(
                        f"A pass over a rank's own data has more than {self.steps_per_epoch} batches, which the first "
                        "passes of all ranks had at most: the epoch ends there.",
                        stacklevel=2,
                    )
        own = iter(()) if self._mine is None else self._mine.batches(epoch * held + min(within, held))
        while True:
            for step in range(within, self.steps_per_epoch):
                batch = next(own) if step < held else None
                if batch is None or not rows_of(batch):
                    yield self._none()
                else:
                    yield counted_by_weight(batch, self._agreed.rows, self.batch)
            within = 0

    def _none(self) -> Batch:
        return self._agreed.placeholder._replace(global_samples=tf.constant(self.batch))


class RankEvaluation:
    """Evaluation of this rank's own batches, as many on every rank."""

    def __init__(self, mine: Iterable[Batch], agreed: Agreed) -> None:
        self._mine = mine
        self._agreed = agreed

    def __iter__(self) -> Iterator[Batch]:
        left = self._agreed.steps
        for batch in self._mine:
            left -= 1
            yield batch if rows_of(batch) else self._agreed.placeholder
        for _ in range(left):
            yield self._agreed.placeholder


def agree_on_parts(first: Batch | None, steps: int, backend: Backend, what: str) -> Agreed:
    """Return the steps, batch and placeholder that fit the data of all ranks. Collective.

    Args:
        first: this rank's first batch, None if it has none.
        steps: number of its batches.
        backend: the replicas.
        what: training, validation or prediction, for messages.

    Raises:
        DataError: no rank has a sample, or the samples of two ranks differ in structure.
    """
    facts = {"steps": steps, "rows": rows_of(first), "kinds": _kinds(first)}
    everyone = gather(backend, facts, timeout=None, among="data_parallel")
    holders = [rank for rank, other in enumerate(everyone) if other["steps"]]
    if not holders:
        raise DataError(f'No rank has {what} samples: with shard="rank" each is given its own part of them.')
    giver = holders[0]
    for rank in holders:
        if everyone[rank]["kinds"] != everyone[giver]["kinds"]:
            raise DataError(
                f"The {what} samples of all ranks must have one structure. Received: {everyone[giver]['kinds']} on "
                f"rank {giver} and {everyone[rank]['kinds']} on rank {rank}."
            )
    row = None if first is None else _row(first)
    if len(holders) < len(everyone):
        # A rank without samples runs another's, which does not count.
        sent = gather(backend, _written(row), timeout=None, among="data_parallel")
        row = _read(sent[giver]) if row is None else row
    assert row is not None, "some rank has samples"
    inputs, targets, sample_weight = row
    placeholder = Batch(
        inputs, targets, sample_weight, has_samples=tf.constant(0.0), global_samples=tf.constant(1), nominal=True
    )
    return Agreed(max(other["steps"] for other in everyone), max(other["rows"] for other in everyone), placeholder)


def counted_by_weight(batch: Batch, rows: int, total: int) -> Batch:
    """Mark a rank's batch as part of a step whose number of samples is not known beforehand.

    Args:
        batch: this rank's samples.
        rows: samples of a rank's full batch.
        total: samples of a step in which all ranks have a full batch.

    Raises:
        DataError: the batch is larger than a full one.
    """
    held = rows_of(batch)
    if held > rows:
        raise DataError(
            f'With shard="rank" the first batch of a rank is its largest. Received: {held} samples in a later one, and '
            f"at most {rows} in the first ones."
        )
    if held == rows:
        return batch._replace(has_samples=1.0, global_samples=total, nominal=True)
    return batch._replace(has_samples=tf.constant(1.0), global_samples=tf.constant(total), nominal=True)


def rows_of(batch: Batch | None) -> int:
    """Return the samples of a rank's own batch."""
    return 0 if batch is None else int(samples_in(batch).shape[0])


def _row(batch: Batch) -> tuple[Any, Any, Any]:
    """Return the first sample [1, …] of a batch."""
    parts = batch.inputs, batch.targets, batch.sample_weight
    return tuple(tf.nest.map_structure(lambda t: None if t is None else t[:1], part) for part in parts)


def _kinds(batch: Batch | None) -> str:
    """Return the nest of dtypes and numbers of dims of a batch."""
    if batch is None:
        return ""
    parts = (batch.inputs, batch.targets, batch.sample_weight)
    return str(tf.nest.map_structure(lambda t: None if t is None else f"{t.dtype.name}[{t.shape.rank} dims]", parts))


def _written(nest: Any) -> Any:
    """Return a nest of tensors as JSON values: nothing that another process sends is unpickled."""
    if nest is None:
        return None
    if isinstance(nest, dict):
        return {"dict": [[key, _written(value)] for key, value in nest.items()]}
    if isinstance(nest, list | tuple):
        return [_written(value) for value in nest]
    octets = base64.b64encode(tf.io.serialize_tensor(nest).numpy()).decode()
    return {"dtype": tf.as_dtype(nest.dtype).name, "tensor": octets}


def _read(written: Any) -> Any:
    if written is None:
        return None
    if isinstance(written, list):
        return tuple(map(_read, written))
    if "dict" in written:
        return {key: _read(value) for key, value in written["dict"]}
    return tf.io.parse_tensor(tf.constant(base64.b64decode(written["tensor"])), tf.as_dtype(written["dtype"]))
