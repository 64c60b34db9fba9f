"""Results of a step, and the protocol of compiled steps."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from hvdtrain.data.batch import Batch


class Totals(Protocol):
    """A tensor, available now or after a worker has run."""

    def numpy(self) -> Any:
        """Wait for the values and return them."""


class StepResult(NamedTuple):
    """Result of a step, as tensors that need not be waited for."""

    totals: Totals
    """[3]: `LocalGradients.totals` over all replicas, or [6]: `GuardedTotals`."""
    measured: "Measured | None"
    """Optional metrics, on logged steps."""
    here: Any = None
    """This replica's part of a guarded step, from `StepGuard.flagged`."""


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

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Reset the epoch's metrics, or restore the `metric_sums` of a resumed epoch."""

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return each metric's state by name, over all replicas. Collective."""

    def recent_metrics(self) -> Mapping[str, Any]:
        """Return the metrics since the last call in the epoch, over all replicas. Collective."""

    def metrics_so_far(self) -> Mapping[str, Any]:
        """Return the metrics of the epoch so far, over all replicas. Collective."""

    def epoch_metrics(self) -> Mapping[str, Any]:
        """Return the metrics since the last call, if requested. Collective."""
