"""What a step returns, and what the loop calls for each batch."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from hvdtrain.data.batch import Batch


class Totals(Protocol):
    """A tensor that is there, or will be once a worker has run."""

    def numpy(self) -> Any:
        """Return its values, after waiting for them."""


class StepResult(NamedTuple):
    """What a step leaves behind, as tensors that nobody has to wait for."""

    totals: Totals
    """[3]: `LocalGradients.totals` over all replicas, or [6]: `GuardedTotals`."""
    measured: "Measured | None"
    """What was asked for besides, on logged steps."""
    here: Any = None
    """Of a guarded step, what there is to say of this replica alone; see `StepGuard.flagged`."""


class Measured(NamedTuple):
    """What costs a pass over memory or a message of its own."""

    learning_rate: tf.Tensor
    """The rate of this update."""
    grad_norm: tf.Tensor
    """Global L2 norm of the reduced gradient before clipping."""
    loss_scale: tf.Tensor | None
    """The dynamic loss scale after this step."""
    metrics: dict[str, Any]
    """Training metrics by name, since the last measured step; or what the step returned, see `returns_logs`."""
    finite: tf.Tensor
    """Whether all parameters are finite after the update."""
    so_far: dict[str, Any] | None = None
    """Those over the epoch so far; None where `metrics` are that."""


class CompiledStep(Protocol):
    """What the loop calls for each batch."""

    returns_logs: bool
    """Whether the metrics are all that is reported, the loss among them if there is one: a model's own `train_step`
    says what it returns. Else the loss is that of the totals."""

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Train on `batch`; `measure` asks for what `Measured` holds."""

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Forget what was counted for `epoch_metrics`, or take up the `metric_sums` of an epoch that is resumed."""

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return the variables of each metric by its name, over all replicas, which call it together."""

    def metrics_so_far(self) -> Mapping[str, Any]:
        """Return the metrics over the epoch's samples so far, on all replicas, which call it together."""

    def epoch_metrics(self) -> Mapping[str, Any]:
        """Return the metrics over all samples since the last call, where somebody asked for them."""
