"""Types shared by passes, update rules and the loop: gradients, parameters, results."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import tensorflow as tf

from hvdtrain.data.batch import Batch
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.runtime.placement import placement_of
from hvdtrain.training.step.placeholder import counted


class Totals(Protocol):
    """A tensor, available now or after a worker has run."""

    def numpy(self) -> Any:
        """Wait for the values and return them."""


class StepResult(NamedTuple):
    """Result of a step, as tensors that need not be waited for."""

    totals: Totals
    """[3]: `LocalGradients.totals` over all replicas, or [6]: `GuardedTotals`; of several steps [steps, …]."""
    measured: "Measured | None"
    """Optional metrics, on logged steps."""
    here: Any = None
    """This replica's part of a guarded step, from `StepGuard.flagged`; of several steps [steps, …]."""


class Measured(NamedTuple):
    """Optional metrics of logged steps only, as they cost extra time."""

    learning_rate: tf.Tensor
    """Of this update."""
    grad_norm: tf.Tensor
    """Global L2 norm of the reduced gradient before clipping."""
    loss_scale: tf.Tensor | None
    """The dynamic loss scale after this step."""
    finite: tf.Tensor
    """Whether all parameters are finite after the update."""


class CompiledStep(Protocol):
    """A step that the loop calls for each batch."""

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Train on `batch`; `measure` fills `Measured`. Collective."""

    def several(self, batches: Sequence[Batch], *, measure: bool) -> Sequence[StepResult]:
        """Train on each of the batches in turn; `measure` is of the last. Collective."""
        last = len(batches) - 1
        return [self(batch, measure=measure and place == last) for place, batch in enumerate(batches)]

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Reset the epoch's metrics, or restore the `metric_sums` of a resumed epoch."""

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return each metric's state by name, over all replicas. Collective."""

    def recent_metrics(self) -> Mapping[str, Any]:
        """Return the metrics since the last call in the epoch, over all replicas. Collective."""

    def show_metrics(self) -> None:
        """Let the model's metrics hold those of all replicas, for user code before the next step. Collective."""

    def results_of_step(self) -> Mapping[str, Any]:
        """Return what the last step returned, over all replicas: metrics of the epoch so far. Collective."""

    def metrics_so_far(self) -> Mapping[str, Any]:
        """Return the metrics of the epoch so far, over all replicas. Collective."""

    def epoch_metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the epoch, which the model's hold until `begin_metrics`. Collective."""


class LocalGradients(NamedTuple):
    """Result of one replica's backward pass; sums over all replicas give the step."""

    gradients: list[Gradient]
    """Gradients of loss scale x loss x weight / expected_weight; for some update rules, shards of global sums."""
    totals: tf.Tensor
    """[3]: loss x weight, weight, and zero, or NaN if inputs or targets are not finite.

    Each is summed over the replicas.
    """
    expected_weight: tf.Tensor
    """Global sum of weights if they are numbers of samples: the same on all replicas."""
    uniform: bool
    """Whether the weights sum to `expected_weight`: then the reduced gradients are already the mean."""
    poison: tf.Tensor | None = None
    """As in `Collected`."""


class Collected(NamedTuple):
    """A replica's accumulable gradients, one per trainable variable."""

    gradients: list[Gradient]
    poison: tf.Tensor | None = None
    """[number of gradients]: zero, or NaN if this replica's gradient is not finite; None: see `gradients`."""


class Pass:
    """Forward and backward pass of one microbatch; gradients are zero unless `has_samples`."""

    def __init__(self, has_samples: tf.Tensor | float, sources: Sequence[tf.Variable]) -> None:
        self._has_samples = has_samples
        self._sources = sources

    def end_forward(self) -> None:
        """Mark the start of the backward pass."""

    def collected(self, gradients: Sequence[Gradient]) -> Collected:
        """Return accumulable gradients for the gradients of `Parameters.sources`."""
        return Collected(
            [
                gradient if serves_others(variable) else counted(gradient, self._has_samples)
                for variable, gradient in zip(self._sources, gradients, strict=True)
            ]
        )


class Parameters:
    """A model's or stage's full variables, by path; base for sharded parameters."""

    exchanges_backward: ClassVar[bool] = False
    """Whether gradients of several replicas are added up while they are computed."""

    def __init__(self, trainable: Mapping[str, tf.Variable]) -> None:
        self._trainable = trainable

    def sources(self) -> list[tf.Variable]:
        """Return the variables to differentiate, one per trainable variable."""
        return list(self._trainable.values())

    @contextmanager
    def passes(self, has_samples: tf.Tensor | float) -> Iterator[Pass]:
        """Context around both passes of a microbatch, entered within the compiled step."""
        yield Pass(has_samples, self.sources())


def serves_others(variable: tf.Variable) -> bool:
    """Return whether other replicas' samples use `variable` (expert, sharded table)."""
    placement = placement_of(variable)
    return placement is not None and bool(placement.held_by)
