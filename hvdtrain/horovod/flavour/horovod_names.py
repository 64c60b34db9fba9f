"""What Horovod's wrapped Keras optimizers have besides the methods of Keras, on either Keras."""

from collections.abc import Sequence
from typing import Any

from hvdtrain.gradients.reduction import Gradient
from hvdtrain.horovod.distribution import Distribution, mark_reduced
from hvdtrain.state.variables import as_written


class HorovodNames:
    """Mixin of a wrapped optimizer: gradients that are reduced when they are computed, local variables, helpers.

    `apply_gradients` does not reduce again what these methods return.
    """

    distribution: Distribution

    @as_written
    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return (reduced gradient, variable) pairs; `loss` is a function, or a value that `tape` recorded.

        With backward_passes_per_step, and within a LossScaleOptimizer, gradients are this rank's still, and reduced
        when they are applied.
        """
        return self._compute_gradients(loss, var_list, None, tape)

    @as_written
    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        gradients, variables = self._local_gradients(loss, var_list, grad_loss, tape)
        if self.distribution.passes > 1 or self._is_scaled:
            return list(zip(gradients, variables, strict=True))
        self.distribution.note_computed()
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    @property
    def _is_scaled(self) -> bool:
        """Whether an optimizer around this one scales the loss, and divides gradients by the scale."""
        return False

    def _local_gradients(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> tuple[Any, Any]:
        """Return this rank's gradients, and the variables."""
        raise NotImplementedError

    @as_written
    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Gradient]:
        """Return the reduced gradients of an optimizer that computes them itself, by a `get_gradients` of its own."""
        own = getattr(super(), "get_gradients", None)
        if own is None:
            raise AttributeError(
                f"{type(self).__name__} has no get_gradients, which belongs to the graphs of TensorFlow 1. Use "
                "compute_gradients(loss, var_list, tape), or minimize."
            )
        gradients = own(loss, params)
        return list(gradients) if self.distribution.passes > 1 else self._allreduce(gradients, params)

    @as_written
    def _allreduce(self, grads: Sequence[Gradient], vars: Sequence[Any]) -> list[Gradient]:
        """Return the reduced gradients of `vars`."""
        return mark_reduced(self.distribution.reduction.reduce(list(grads), list(vars)))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self.distribution.reduction.keep_local([var])

    @property
    def process_set(self) -> Any:
        """The ranks that reduce."""
        return self.distribution.reduction.process_set

    @property
    def _agg_helper(self) -> Distribution | None:
        """What aggregates gradients locally, with a `counter` of passes; None without backward_passes_per_step."""
        return self.distribution if self.distribution.passes > 1 else None
