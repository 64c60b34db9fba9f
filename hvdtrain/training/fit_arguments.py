"""The arguments of `Trainer.fit`: what must be the same on every rank, and the data that they name."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.training.inputs import training_data, validation_batches, with_class_weights


@dataclass(frozen=True)
class FitArguments:
    """Arguments of `Trainer.fit`, by its names; see there."""

    dataset: Any
    validation_data: Any
    class_weight: Mapping[int, float] | None
    batch: int | None
    epochs: int
    validation_batch: int
    log_every: int
    steps_per_epoch: int | None
    shuffle: bool

    def check(self) -> None:
        """Refuse numbers that are none.

        Raises:
            ConfigError: naming the argument.
        """
        for name in ("epochs", "log_every", "validation_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1. Received: {getattr(self, name)}.")

    def training(self, backend: Backend, seed: int) -> TrainingData:
        """Return the stream of this replica's batches; see `training_data`."""
        return training_data(
            with_class_weights(self.dataset, self.class_weight),
            backend,
            batch=self.batch,
            seed=seed,
            shuffle=self.shuffle,
            steps_per_epoch=self.steps_per_epoch,
        )

    def validation(self, backend: Backend) -> Iterable[Batch] | None:
        """Return this replica's part of the validation data, None where there are none; see `validation_batches`."""
        if self.validation_data is None:
            return None
        return validation_batches(self.validation_data, backend, batch=self.validation_batch)
