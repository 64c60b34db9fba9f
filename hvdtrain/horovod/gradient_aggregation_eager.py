"""Local gradient aggregation in eager code, as `horovod.tensorflow.gradient_aggregation_eager`."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import gradient_aggregation_eager as _horovods

from hvdtrain.compat.horovod import aggregates_gradients
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.names import global_process_set, size_op
from hvdtrain.state.variables import as_written, unwrap

__all__ = ["LocalGradientAggregationHelperEager", "global_process_set", "size_op"]


class LocalGradientAggregationHelperEager(_horovods.LocalGradientAggregationHelperEager):
    """Horovod's helper for eager code: sums gradients, and reduces them every `backward_passes_per_step` calls.

    Unlike Horovod's it takes Keras 3 variables and optimizers, and gradients that are None.
    """

    _present: list[int] | None = None
    """Places of the gradients that are not None."""

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        super().register_local_var(unwrap(var))

    @as_written
    def compute_gradients(self, grads: Sequence[Any], vars: Sequence[Any]) -> list[Any]:
        """Add `grads` to what was aggregated, and return the sum; in every last pass, reduced over the ranks.

        Raises:
            ConfigError: gradients are None for other variables than in the passes before.
        """
        present = [i for i, gradient in enumerate(grads) if gradient is not None]
        if self._present not in (None, present):
            raise ConfigError(
                "Gradients must be None for the same variables in all passes. Received: gradients for the variables "
                f"number {present}, in the passes before for {self._present}."
            )
        self._present = present
        sums = super().compute_gradients([grads[i] for i in present], [unwrap(vars[i]) for i in present])
        results: list[Any] = [None] * len(grads)
        for i, total in zip(present, sums, strict=True):
            results[i] = total
        return results

    @as_written
    def apply_gradients(self, apply_grads_closure: Callable[[], Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `apply_grads_closure` after a pass that reduced; after any other one count the iteration only."""
        if aggregates_gradients(optimizer):
            return super().apply_gradients(apply_grads_closure, optimizer, *args, **kwargs)

        def update() -> tf.Tensor:
            apply_grads_closure()
            return tf.constant(True)

        def skip() -> tf.Tensor:
            if getattr(optimizer, "iterations", None) is not None:
                unwrap(optimizer.iterations).assign_add(1)
            return tf.constant(False)

        return tf.cond(tf.equal(self.counter, 0), update, skip)


def __getattr__(name: str) -> Any:
    """Return what else Horovod's module has."""
    return getattr(_horovods, name)
