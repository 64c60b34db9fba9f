"""A callback of a training, and what it is told of a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from hvdtrain.training.step.contract import Measured, StepResult


class Outcome(IntEnum):
    """Effect of a callback on the loop; the same on every rank."""

    CONTINUE = 0
    STOP = 1
    """Stop after this step. Later callbacks that are due at the end of an epoch or of training are still called."""


@dataclass(slots=True, kw_only=True)
class StepEnd:
    """A step, or the last of several that are taken in one call, as seen by callbacks."""

    number: int
    """Completed optimizer steps, including this one."""
    epoch: int
    """Epoch, from 0."""
    place: int
    """Step within the epoch, from 0; of several the first one's."""
    steps: int = 1
    """How many it stands for."""
    first: bool
    """Whether it is the first step of training."""
    ends_epoch: bool
    """Whether it is the last step of its epoch, possibly cut short."""
    last: bool
    """Whether it is the last step of training, as planned or stopped by an earlier callback."""
    stops: bool = False
    """Whether all ranks stop after it because of a signal; its epoch continues when resumed."""
    measured: bool = False
    """Whether it was measured, and so waited for."""
    results: Sequence[StepResult] = ()
    """Of all steps, of which some may be stacked; none before the step."""
    loss: float = float("nan")
    """Mean since the last measured step; known once a measured step was checked."""
    outcome: Outcome = Outcome.CONTINUE
    """Effect of earlier callbacks."""

    @property
    def measurement(self) -> Measured:
        """What was measured, after a measured step."""
        measured = self.results[-1].measured
        assert measured is not None, "callbacks that ask for it are due after measured steps"
        return measured

    def passes(self, every: int) -> bool:
        """Return whether the number of one of its steps is divisible by `every`."""
        return self.number // every > (self.number - self.steps) // every


@dataclass(frozen=True)
class When:
    """Steps after which a callback is due."""

    every: int | None = None
    """Steps whose number is divisible by this; of several in one call, those with one such."""
    first: bool = False
    epoch_ends: bool = False
    last: bool = False
    measured: bool = False
    stops: bool = False

    def due(self, step: StepEnd) -> bool:
        """Return whether a callback is due after `step`."""
        return bool(
            (self.every and step.passes(self.every))
            or (self.measured and step.measured)
            or (self.epoch_ends and step.ends_epoch)
            or (self.first and step.first)
            or (self.last and step.last)
            or (self.stops and step.stops)
        )


NEVER = When()
EVERY_STEP = When(every=1)
MEASURED = When(measured=True)
EPOCH_ENDS = When(epoch_ends=True)
STOPS = When(stops=True)


class Callback:
    """Something that happens between steps.

    All ranks have the same list, so a callback may exchange in any of its methods.
    """

    when: When = NEVER
    """Steps after which `after_step` is called."""
    measures: When = NEVER
    """Steps that are measured, and waited for, for its sake."""

    def begin(self) -> None:
        """Called before the first step."""

    def before_step(self, step: StepEnd) -> None:
        """Called before every step, with the facts known by then."""

    def after_step(self, step: StepEnd) -> Outcome | None:
        """Called after the steps of `when`; None means `Outcome.CONTINUE`."""
