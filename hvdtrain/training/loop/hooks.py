"""Hooks between two steps: when each is due, and its effect on the loop."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum

from hvdtrain.data.batch import Batch
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks
from hvdtrain.training.step.result import StepResult


@dataclass(frozen=True, kw_only=True)
class Actions:
    """Operations of the trainer that the loop calls. Each is collective."""

    evaluate: Callable[[Iterable[Batch], EvaluationHooks | None], Evaluation]
    """Evaluates the model."""
    prepare_to_evaluate: Callable[[], None]
    """Prepares the model for `evaluate`."""
    consolidate: Callable[[], None]
    """Makes the model hold the weights to be evaluated."""
    prepare_to_save: Callable[[], None]
    """Prepares the state for saving."""
    averaged_weights: Callable[[], AbstractContextManager[None]]
    """Swaps in the EMA of the weights inside a context."""
    save: Callable[[], object] | None
    """Saves the state, possibly in the background; None: never."""
    finish_save: Callable[[], object] = lambda: None
    """Waits until it is saved."""
    commit: Callable[[], object] | None = None
    """Commits the state to memory, and ends an elastic world whose hosts have changed; None: not elastic."""
    begin_step: Callable[[], None] = lambda: None
    """Called before each step of elastic training."""
    roll_back: Callable[[], Scalars] | None = None
    """Restores the newest good checkpoint's tensors, and returns its scalars; None: never."""


class Outcome(IntEnum):
    """Effect of a hook on the loop; the same on every rank."""

    CONTINUE = 0
    SKIP = 1
    """The step changed nothing (its gradients overflowed): training continues."""
    STOP = 2
    """Stop after this step. Later hooks that are due at the end of an epoch or of training still run."""
    ROLL_BACK = 3
    """The step is undone: later hooks are not called, and training continues from the last snapshot."""


@dataclass(slots=True, kw_only=True)
class StepEnd:
    """A completed step, as seen by hooks."""

    number: int
    """Completed optimizer steps, including this one."""
    epoch: int
    """Epoch, from 0."""
    place: int
    """Step within the epoch, from 0."""
    first: bool
    """Whether it is the first step of training."""
    ends_epoch: bool
    """Whether it is the last step of its epoch, possibly cut short."""
    last: bool
    """Whether it is the last step of training, as planned or stopped by an earlier hook."""
    stops: bool = False
    """Whether all ranks stop after it because of a signal; its epoch continues when resumed."""
    measured: bool = False
    """Whether it was measured, and so waited for."""
    result: StepResult | None = None
    outcome: Outcome = Outcome.CONTINUE
    """Effect of earlier hooks."""


@dataclass(frozen=True)
class When:
    """Steps after which a hook is due."""

    every: int | None = None
    """Steps whose number is divisible by this."""
    first: bool = False
    epoch_ends: bool = False
    last: bool = False
    measured: bool = False
    stops: bool = False

    def due(self, step: StepEnd) -> bool:
        """Return whether a hook is due after `step`."""
        return bool(
            (self.every and step.number % self.every == 0)
            or (self.measured and step.measured)
            or (self.epoch_ends and step.ends_epoch)
            or (self.first and step.first)
            or (self.last and step.last)
            or (self.stops and step.stops)
        )


EVERY_STEP = When(every=1)
MEASURED = When(measured=True)
EPOCH_ENDS = When(epoch_ends=True)
STOPS = When(stops=True)

Hook = Callable[[StepEnd], Outcome | None]
"""Called after a step; None means `Outcome.CONTINUE`."""
