"""Arguments of `Trainer.fit`, by Keras' names, and the data they specify."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.python_batches import as_function
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.data_arguments import (
    check_counts,
    check_shard,
    combined,
    global_batch,
    is_arrays,
    number_of_samples,
    split_arrays,
)
from hvdtrain.training.inputs import training_data, with_class_weights
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.rank_inputs import evaluation_data, rank_training_data

BATCH_SIZE = 32
"""Default samples per rank and step for arrays, as in Keras."""
VALIDATION_BATCH = 256
"""Default samples per evaluation step over all ranks."""


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """The training samples, and how they are read."""

    x: Any
    y: Any
    sample_weight: Any
    class_weight: Mapping[int, float] | None
    batch_size: int | None
    batch: int | None
    steps_per_epoch: int | None
    shuffle: bool
    shard: str | None

    def given(self, passes: int = 1) -> Any:
        """Return the data as one value, for so many passes."""
        return combined(as_function(self.x, self.steps_per_epoch, passes=passes), self.y, self.sample_weight)

    def global_batch(self, backend: Backend) -> int | None:
        """Return the samples per step over all ranks; None if the data are batched."""
        return self._batch_for(self.given(), backend)

    def _batch_for(self, data: Any, backend: Backend) -> int | None:
        """Return the samples per step over all ranks; of arrays by default as many as `steps_per_epoch` asks for."""
        if not is_arrays(data):
            return global_batch(self.batch_size, self.batch, backend)
        if self.steps_per_epoch and self.batch_size is None and self.batch is None:
            return -(-number_of_samples(data) // self.steps_per_epoch)
        return global_batch(self.batch_size, self.batch, backend, BATCH_SIZE)

    def training(self, data: Any, backend: Backend, seed: int) -> TrainingData:
        """Return the stream of this replica's batches of `data`."""
        read = training_data if self.shard is None else rank_training_data
        return read(
            with_class_weights(data, self.class_weight),
            backend,
            batch=self._batch_for(data, backend),
            seed=seed,
            shuffle=bool(self.shuffle),
            steps_per_epoch=self.steps_per_epoch,
        )


@dataclass(frozen=True, kw_only=True)
class ValidationArguments:
    """The validation samples, and after which epochs to evaluate."""

    validation_split: float
    validation_data: Any
    validation_steps: int | None
    validation_batch_size: int | None
    validation_batch: int | None
    validation_freq: int | Sequence[int]

    def batches(self, data: Any, backend: Backend, batch_size: int | None, shard: str | None = None) -> Iterable[Batch]:
        """Return this replica's share of `data`; default: `batch_size` samples per rank."""
        per_rank = self.validation_batch_size or (batch_size if self.validation_batch is None else None)
        batch = global_batch(per_rank, self.validation_batch, backend) or VALIDATION_BATCH
        return evaluation_data(data, backend, batch=batch, steps=self.validation_steps, shard=shard)

    @property
    def epochs(self) -> int | tuple[int, ...]:
        """`validation_freq` in the form of `Plan`."""
        freq = self.validation_freq
        return int(freq) if isinstance(freq, int | np.integer) else tuple(int(epoch) for epoch in freq)


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """Arguments of `Trainer.fit`."""

    data: DataArguments
    validation: ValidationArguments
    epochs: int
    initial_epoch: int
    log_every: int

    def facts(self) -> dict[str, Any]:
        """Return all arguments by name, for comparison across ranks."""
        own = {"epochs": self.epochs, "initial_epoch": self.initial_epoch, "log_every": self.log_every}
        freq = {"validation_freq": str(self.validation.validation_freq)}
        return {**vars(self.data), **vars(self.validation), **own, **freq}

    def check(self) -> None:
        """Reject invalid counts, and arguments that exclude one another. Raises ConfigError naming the argument."""
        facts = self.facts()
        of_data = ("batch_size", "batch", "steps_per_epoch")
        of_validation = ("validation_steps", "validation_batch_size", "validation_batch")
        check_shard(self.data.shard)
        names = (*of_data, *of_validation, "epochs", "initial_epoch", "log_every")
        check_counts({name: facts[name] for name in names}, {"initial_epoch": 0})
        freq = self.validation.validation_freq
        if not isinstance(freq, Sequence) and not (isinstance(freq, int | np.integer) and freq >= 1):
            raise ConfigError(
                f"validation_freq is a number of epochs, or a list of those to evaluate after. Received: {freq!r}."
            )

    def streams(self, backend: Backend, seed: int) -> tuple[TrainingData, Iterable[Batch] | None]:
        """Return this replica's training batches and its validation batches, if any.

        Raises ConfigError for arguments that do not fit the kind of data, and DataError for unusable data.
        """
        data, held_out = self.data.given(self.epochs - self.initial_epoch), combined(self.validation.validation_data)
        if held_out is None and self.validation.validation_split:
            data, held_out = split_arrays(data, self.validation.validation_split)
        training = self.data.training(data, backend, seed)
        if held_out is None:
            return training, None
        return training, self.validation.batches(held_out, backend, self.data.batch_size, self.data.shard)

    def plan(self, scalars: Scalars, steps_per_epoch: int) -> Plan:
        """Return the plan of the remaining training in state `scalars`."""
        left = (self.epochs - scalars.epoch_of_training) * steps_per_epoch - scalars.step_in_epoch
        steps = 0 if scalars.stopped else max(0, left)
        return Plan(
            scalars.step + steps,
            log_every=self.log_every,
            validation_freq=self.validation.epochs,
            epoch_offset=-scalars.epochs_before,
        )
