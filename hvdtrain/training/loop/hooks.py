"""What happens between two steps: hooks, when each is due, and what it makes of the step."""

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
    """What the trainer does for its loop; every rank calls each of them at the same steps."""

    evaluate: Callable[[Iterable[Batch], EvaluationHooks | None], Evaluation]
    """Evaluates the model."""
    prepare_to_evaluate: Callable[[], None]
    """Makes the model what `evaluate` evaluates."""
    consolidate: Callable[[], None]
    """Makes the model hold the weights that are evaluated."""
    prepare_to_save: Callable[[], None]
    """Makes the state hold what is saved."""
    averaged_weights: Callable[[], AbstractContextManager[None]]
    """Gives the model the optimizer's averages of its weights inside a context."""
    save: Callable[[], object] | None
    """Saves the state, or begins to; None where nothing is saved."""
    finish_save: Callable[[], object] = lambda: None
    """Waits until it is saved."""
    commit: Callable[[], object] | None = None
    """Keeps the state in memory, and ends an elastic world whose hosts have changed; None where it is not elastic."""
    begin_step: Callable[[], None] = lambda: None
    """Called before each step of an elastic training."""
    roll_back: Callable[[], Scalars] | None = None
    """Gives the state the tensors of its newest good checkpoint, and returns the scalars of that; None: never."""


class Outcome(IntEnum):
    """What a hook makes of the step that ended; the same on every rank."""

    CONTINUE = 0
    SKIP = 1
    """The step changed nothing (its gradients overflowed): training goes on."""
    STOP = 2
    """Training ends here, and so does the epoch: hooks that are due then are due now, if they are later in the list."""
    ROLL_BACK = 3
    """The step is undone: no later hook sees it, and training goes on from the last snapshot."""


@dataclass(slots=True, kw_only=True)
class StepEnd:
    """A finished step, as hooks see it."""

    number: int
    """Finished optimizer steps, this one included."""
    epoch: int
    """The step's epoch, from 0."""
    place: int
    """The step's place in its epoch, from 0."""
    first: bool
    """Whether training began with it."""
    ends_epoch: bool
    """Whether its epoch ends with it, cut short or not."""
    last: bool
    """Whether training ends with it, as planned or because an earlier hook stopped it."""
    stops: bool = False
    """Whether all ranks stop after it, as one of them got a signal; its epoch goes on where training is resumed."""
    measured: bool = False
    """Whether its figures were measured, and so waited for."""
    result: StepResult | None = None
    outcome: Outcome = Outcome.CONTINUE
    """What earlier hooks made of it."""


@dataclass(frozen=True)
class When:
    """After which steps a hook is due."""

    every: int | None = None
    """Steps whose number divides by this."""
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
