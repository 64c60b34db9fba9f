"""The part of the state that lives on the host: counts, the position in the data, and the epoch's figures so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.data.identity import Identity


@dataclass
class Progress:
    """What the epoch under way has come to so far: with it, an epoch that is resumed reports the whole epoch."""

    loss_sum: float = 0.0
    """Sum of the weighted losses over all replicas."""
    loss_weight: float = 0.0
    """Sum of their weights."""
    metrics: dict[str, list[Any]] = field(default_factory=dict)
    """Variables of each epoch metric by its name, summed over all replicas."""
    callbacks: list[dict[str, Any]] = field(default_factory=list)
    """What each callback remembers; see `state.callbacks`."""


@dataclass(kw_only=True)
class BadSteps:
    """The bad steps of a training so far; see `config.bad_steps`."""

    non_finite: int = 0
    """Steps whose loss or gradient was NaN or infinite."""
    spikes: int = 0
    """Steps whose loss was a spike."""
    last: int = 0
    """The last of them, as its number counted from 1; 0 where there was none."""
    in_a_row: int = 0
    """Of the steps up to the last one, those that were bad without a good one between."""
    in_epoch: int = 0
    """Those of the epoch under way."""
    rollbacks: list[list[int]] = field(default_factory=list)
    """Of each time that training was rolled back, the first and the last step that was left out."""


@dataclass(kw_only=True)
class Scalars:
    """The part of the state that lives on the host."""

    step: int = 0
    """Finished optimizer steps, on whatever data."""
    epoch: int = 0
    """Finished passes over the data."""
    step_in_epoch: int | None = 0
    """Finished steps of the epoch under way; None in checkpoints of earlier versions, whose steps tell."""
    seed: int = 0
    data: Identity | None = None
    """Fingerprint of the samples; None where it is unknown, as in checkpoints of earlier versions."""
    processes: int | None = None
    """How many of them share the files of an epoch (--shard-by files); None where that does not matter."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What is wrong with the samples of training that are left out (--on-bad-record), by number."""
    best: dict[str, Any] | None = None
    """The best epoch so far: `metric`, `mode`, `value`, and the `step` at its end; None where no best is kept."""
    epochs_before: int = 0
    """Passes over the data that came before epoch 0 of this training; below 0 where `fit` began later than there."""
    stopped: bool = False
    """Whether a callback ended the training."""
    progress: Progress = field(default_factory=Progress)
    bad_steps: BadSteps = field(default_factory=BadSteps)
    recent_losses: list[float] = field(default_factory=list)
    """Losses of the latest good steps, with which a new one is compared (--spike-threshold)."""

    def place(self, steps_per_epoch: int) -> int:
        """Return the finished steps of the epoch under way, in data of `steps_per_epoch`."""
        if self.step_in_epoch is None:
            self.step_in_epoch = self.step - self.epoch * steps_per_epoch
        return self.step_in_epoch

    def place_in_data(self, steps_per_epoch: int) -> int:
        """Return the finished steps of all epochs, as if all had had `steps_per_epoch`."""
        return self.epoch * steps_per_epoch + self.place(steps_per_epoch)

    def advance(self, steps_per_epoch: int) -> None:
        """Count one step."""
        place = self.place(steps_per_epoch) + 1
        self.step += 1
        self.epoch, self.step_in_epoch = self.epoch + place // steps_per_epoch, place % steps_per_epoch

    def begin_training(self, initial_epoch: int = 0) -> None:
        """Begin a new training with the next epoch, which is its `initial_epoch`; steps are counted on."""
        self.step_in_epoch = 0
        self.epochs_before = self.epoch - initial_epoch
        self.best, self.stopped, self.data = None, False, None
        self.progress, self.bad_steps, self.recent_losses = Progress(), BadSteps(), []

    @property
    def epoch_of_training(self) -> int:
        """Finished epochs of this training, from its epoch 0 on."""
        return self.epoch - self.epochs_before


def scalars_from(saved: Mapping[str, Any]) -> Scalars:
    """Return the scalars of a checkpoint.

    One of an earlier version may say nothing of the place in the epoch, and repeat the optimizer's loss scale.
    """
    values = {"step_in_epoch": None if saved.get("step") else 0, **saved}
    values.pop("loss_scale", None)
    progress, bad_steps = Progress(**values.get("progress", {})), BadSteps(**values.get("bad_steps", {}))
    return Scalars(**{**values, "progress": progress, "bad_steps": bad_steps})
