"""What the trainer does for its loop."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from hvdtrain.data.batch import Batch
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.evaluation.hooks import EvaluationHooks


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
