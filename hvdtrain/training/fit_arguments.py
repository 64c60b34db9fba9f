"""The arguments of `Trainer.fit`, by Keras' names: what must be the same on every rank, and the data that they name."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.generator_object import as_function
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.data_arguments import (
    check_counts,
    check_shard,
    combined,
    global_batch,
    is_arrays,
    split_arrays,
)
from hvdtrain.training.inputs import training_data, with_class_weights
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.rank_inputs import evaluation_data, rank_training_data

BATCH_SIZE = 32
"""Samples per rank and step of arrays by default, as in Keras."""
VALIDATION_BATCH = 256
"""Samples per evaluation step over all ranks by default."""


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """The samples to train on, and how they are read."""

    x: Any
    y: Any
    sample_weight: Any
    class_weight: Mapping[int, float] | None
    batch_size: int | None
    batch: int | None
    steps_per_epoch: int | None
    shuffle: bool
    shard: str | None

    def given(self) -> Any:
        """Return the data as one argument; see `combined`."""
        return combined(as_function(self.x, self.steps_per_epoch), self.y, self.sample_weight)

    def global_batch(self, backend: Backend) -> int | None:
        """Return the samples of a step over all ranks; None where the data come in batches."""
        return global_batch(self.batch_size, self.batch, backend, BATCH_SIZE if is_arrays(self.given()) else None)

    def training(self, data: Any, backend: Backend, seed: int) -> TrainingData:
        """Return the stream of this replica's batches of `data`; see `training_data`."""
        read = training_data if self.shard is None else rank_training_data
        return read(
            with_class_weights(data, self.class_weight),
            backend,
            batch=global_batch(self.batch_size, self.batch, backend, BATCH_SIZE if is_arrays(data) else None),
            seed=seed,
            shuffle=bool(self.shuffle),
            steps_per_epoch=self.steps_per_epoch,
        )


@dataclass(frozen=True, kw_only=True)
class ValidationArguments:
    """The samples to evaluate, and after which epochs."""

    validation_split: float
    validation_data: Any
    validation_steps: int | None
    validation_batch_size: int | None
    validation_batch: int | None
    validation_freq: int | Sequence[int]

    def batches(self, data: Any, backend: Backend, batch_size: int | None, shard: str | None = None) -> Iterable[Batch]:
        """Return this replica's part of `data`, in batches of `batch_size` per rank by default."""
        per_rank = self.validation_batch_size or (batch_size if self.validation_batch is None else None)
        batch = global_batch(per_rank, self.validation_batch, backend) or VALIDATION_BATCH
        return evaluation_data(data, backend, batch=batch, steps=self.validation_steps, shard=shard)

    @property
    def epochs(self) -> int | tuple[int, ...]:
        """`validation_freq` as `Plan` takes it."""
        freq = self.validation_freq
        return int(freq) if isinstance(freq, int | np.integer) else tuple(int(epoch) for epoch in freq)


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """Arguments of `Trainer.fit`, by its names; see there."""

    data: DataArguments
    validation: ValidationArguments
    epochs: int
    initial_epoch: int
    log_every: int

    def facts(self) -> dict[str, Any]:
        """Return all arguments by name, to be compared over the ranks."""
        own = {"epochs": self.epochs, "initial_epoch": self.initial_epoch, "log_every": self.log_every}
        freq = {"validation_freq": str(self.validation.validation_freq)}
        return {**vars(self.data), **vars(self.validation), **own, **freq}

    def check(self) -> None:
        """Refuse numbers that are none, and arguments that exclude one another.

        Raises:
            ConfigError: naming the argument.
        """
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
        """Return this replica's batches to train on and, if there are any, to evaluate.

        Raises:
            ConfigError: arguments that do not fit the kind of data.
            DataError: data that cannot be used.
        """
        data, held_out = self.data.given(), combined(self.validation.validation_data)
        if held_out is None and self.validation.validation_split:
            data, held_out = split_arrays(data, self.validation.validation_split)
        training = self.data.training(data, backend, seed)
        if held_out is None:
            return training, None
        return training, self.validation.batches(held_out, backend, self.data.batch_size, self.data.shard)

    def plan(self, scalars: Scalars, steps_per_epoch: int) -> Plan:
        """Return the plan of what is left of the training that `scalars` is in: up to `epochs`, or until it stopped."""
        left = (self.epochs - scalars.epoch_of_training) * steps_per_epoch - scalars.place(steps_per_epoch)
        steps = 0 if scalars.stopped else max(0, left)
        return Plan(
            scalars.step + steps,
            log_every=self.log_every,
            validation_freq=self.validation.epochs,
            epoch_offset=-scalars.epochs_before,
        )
