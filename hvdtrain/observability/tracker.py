"""A training as one run of an experiment tracker, whatever the ranks and however often it is resumed."""

import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.observability.events import EpochRecord, Observer, RunInfo, StepRecord
from hvdtrain.observability.jsonl import flat_record
from hvdtrain.observability.tensorboard import curves_of
from hvdtrain.runtime.logs import LOGGER

NO_FACTS = {"wording", "run_dir"}
"""Fields of `RunInfo` that are no parameters of a training."""


class Tracker(keras.callbacks.Callback, Observer):
    """A callback of `fit` on every rank; rank 0 writes.

    What identifies the run is a part of checkpoints, and of the commits of an elastic training. Training goes on
    without a tracker that can no longer be reached.

    Args:
        parameters: of the training, besides those that `fit` knows: a nest of dicts.
    """

    def __init__(self, parameters: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        self._parameters = dict(parameters or {})
        self._training, self._agreed = uuid.uuid4().hex[:16], False
        self._open = self._ended = False
        self.required = True
        """Whether a run that cannot be begun is an error; else the training goes on without."""

    def get_state(self) -> dict[str, Any]:
        """Return what identifies the run, for checkpoints."""
        return {"training": self._training, "agreed": self._agreed}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Go on with a run."""
        self._training, self._agreed = state["training"], True

    def prepare(self, step: int, *, required: bool) -> None:
        """Note, on every rank, that a training begins or goes on after so many steps.

        Args:
            step: finished steps; a new training is a new run.
            required: see `self.required`.
        """
        if self._ended and not step:
            self._training, self._agreed = uuid.uuid4().hex[:16], False
        self.required, self._ended = required, False

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuse Keras' own `fit`, which tells nothing to observers. Raises ConfigError."""
        if not self._agreed:
            raise ConfigError(f"{type(self).__name__} is for hvdtrain.Trainer(model).fit: Model.fit tells it nothing.")

    def on_train_end(self, logs: Any = None) -> None:
        self._ended = True

    def on_start(self, info: RunInfo) -> None:
        """Begin the run, or go on with it.

        Raises:
            ConfigError: it cannot be begun.
        """
        facts = {name: value for name, value in asdict(info).items() if name not in NO_FACTS and value is not None}
        name = info.recipe if info.run_dir is None else info.run_dir.name
        try:
            self.begin(self._training, name, {**facts, **self._parameters})
        except Exception as error:  # of many kinds: no account, no network, no such place
            said = f"{self.output} cannot begin a run: {' '.join(str(error).split())}"
            if self.required:
                raise ConfigError(said) from error
            LOGGER.warning(f"{said}. Training goes on without it.")
        else:
            self._open = True

    def on_step(self, record: StepRecord) -> None:
        """Write the figures of a logged step, as `train/loss` …"""
        figures = {f"train/{name}": value for name, value in flat_record("step", record).items()}
        self._write(figures, record.step, record.epoch)

    def on_epoch(self, record: EpochRecord) -> None:
        """Write loss and metrics of an epoch by Keras' names: `loss`, `val_loss` …"""
        self._write(record.figures, record.step, record.epoch)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Write the results, and end the run."""
        if not self._open:
            return
        with self._reached():
            self.end({name: value for name, value in summary.items() if isinstance(value, bool | int | float | str)})
        self._open = False

    def close(self) -> None:
        """End the run as one that was interrupted, if it has not ended: it may go on later."""
        if self._open:
            self._open = False
            try:
                self.interrupt()
            except Exception as error:  # another one may have ended the training
                LOGGER.warning(f"{self.output} cannot end the run: {' '.join(str(error).split())}")

    def _write(self, figures: Mapping[str, Any], step: int, epoch: int) -> None:
        if not self._open:
            return
        values = {curve: float(each) for name, value in figures.items() for curve, each in _curves(name, value).items()}
        with self._reached():
            self.write({**values, "epoch": epoch + 1}, step)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raise a tracker's errors as those of files, without which training goes on."""
        try:
            yield
        except Exception as error:
            raise OSError(" ".join(str(error).split())) from error

    @abstractmethod
    def begin(self, training: str, name: str, parameters: dict[str, Any]) -> None:
        """Begin a run that is identified by `training`, or go on with it if there is one."""

    @abstractmethod
    def write(self, figures: dict[str, float], step: int) -> None:
        """Write figures after `step` steps; must not wait for a network."""

    @abstractmethod
    def end(self, results: dict[str, Any]) -> None:
        """End the run."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the run as one that was interrupted."""


def _curves(name: str, value: Any) -> dict[str, Any]:
    return {} if name.rpartition("/")[2] in ("kind", "step", "epoch") else curves_of(name, value)
