"""Host-side state: counters, the position in the data, and the current epoch's metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.data.identity import Identity


@dataclass
class Progress:
    """Running totals of the current epoch, so that resumed epochs are complete."""

    loss_sum: float = 0.0
    """Sum of the weighted losses over all replicas."""
    loss_weight: float = 0.0
    """Sum of the weights."""
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    """State of each epoch metric by name, summed over all replicas."""
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """State of each callback, from `state.callbacks`."""


@dataclass(kw_only=True)
class BadSteps:
    """Bad steps (NaN, Inf, loss spikes) of a training so far."""

    non_finite: int = 0
    """Steps with a NaN or infinite loss or gradient."""
    spikes: int = 0
    """Steps with a loss spike."""
    last: int = 0
    """Number of the last bad step, from 1; 0: none."""
    in_a_row: int = 0
    """Consecutive bad steps up to `last`."""
    in_epoch: int = 0
    """Bad steps in the current epoch."""
    rollbacks: list[list[int]] = field(default_factory=list)
    """First and last discarded step of each rollback."""


@dataclass(kw_only=True)
class Scalars:
    """Host-side state."""

    step: int = 0
    """Completed optimizer steps, on any data."""
    epoch: int = 0
    """Completed passes over the data."""
    step_in_epoch: int = 0
    """Completed steps of the current epoch."""
    seed: int = 0
    data: Identity | None = None
    """Fingerprint of the samples; None if unknown."""
    processes: int | None = None
    """Number of processes that share the files of an epoch (--shard-by files), else None."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Errors of skipped training samples (--on-bad-record), by number."""
    best: dict[str, Any] | None = None
    """Best epoch so far: `metric`, `mode`, `value`, and the `step` at its end; None if not tracked."""
    first_epoch: int = 0
    """Passes over data before this training."""
    epochs_before: int = 0
    """Passes over the data before epoch 0 of this training; negative if `fit` started at a later epoch."""
    stopped: bool = False
    """Whether a callback stopped the training."""
    progress: Progress = field(default_factory=Progress)
    bad_steps: BadSteps = field(default_factory=BadSteps)
    recent_losses: list[float] = field(default_factory=list)
    """Losses of recent good steps, for spike detection (--spike-threshold)."""

    def place_in_data(self, steps_per_epoch: int) -> int:
        """Return the completed steps of all epochs of `steps_per_epoch`."""
        return self.epoch * steps_per_epoch + self.step_in_epoch

    def advance(self, steps_per_epoch: int, steps: int = 1) -> None:
        """Count steps of one epoch."""
        place = self.step_in_epoch + steps
        self.step += steps
        self.epoch, self.step_in_epoch = self.epoch + place // steps_per_epoch, place % steps_per_epoch

    def begin_training(self, initial_epoch: int = 0) -> None:
        """Start a new training with the next epoch as its `initial_epoch`; `step` continues."""
        self.step_in_epoch = 0
        self.first_epoch, self.epochs_before = self.epoch, self.epoch - initial_epoch
        self.best, self.stopped, self.data = None, False, None
        self.progress, self.bad_steps, self.recent_losses = Progress(), BadSteps(), []

    @property
    def epoch_of_training(self) -> int:
        """Completed epochs of this training, from its epoch 0."""
        return self.epoch - self.epochs_before


def scalars_from(saved: Mapping[str, Any]) -> Scalars:
    """Return the scalars of a checkpoint."""
    progress, bad_steps = Progress(**saved.get("progress", {})), BadSteps(**saved.get("bad_steps", {}))
    return Scalars(**{**saved, "progress": progress, "bad_steps": bad_steps})
