"""The Adasum optimizer for optimizers of `tf.compat.v1.train`.

Horovod 0.28.1 has the class, but its `apply_gradients` reduces nothing: ranks drift apart.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import session_adasum_class, wrapped_optimizer
from hvdtrain.compat.tensorflow import session_counter, session_slot
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Adasum, Compression
from hvdtrain.horovod.collectives import allreduce
from hvdtrain.runtime.collectives import collective_name
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import as_written


class AdasumOptimizer(session_adasum_class()):  # type: ignore[misc]
    """An optimizer that steps with local gradients, and then combines the ranks' changes of the variables by Adasum.

    With `backward_passes_per_step` it steps that many times before the changes are combined.

    Raises:
        ConfigError: `backward_passes_per_step` is not a positive number.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        backward_passes_per_step: int = 1,
    ) -> None:
        if backward_passes_per_step < 1:
            raise ConfigError(f"backward_passes_per_step must be > 0. Received: {backward_passes_per_step}.")
        super().__init__(
            optimizer, name, use_locking, device_dense, device_sparse, compression, backward_passes_per_step
        )
        self._device = device_dense or device_sparse
        self._passes, self._compressor = backward_passes_per_step, compression

    @as_written
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply this rank's gradients, and in every last pass combine the change since the last exchange."""
        pairs = list(grads_and_vars)
        variables = [variable for gradient, variable in pairs if gradient is not None]
        with tf.init_scope():
            starts = [session_slot(self, variable, "delta_start") for variable in variables]
            steps = session_counter(self, "step_count", variables[0])
        role, passes = numbered(self.get_name()), self._passes
        begins = tf.equal(steps.read_value() % passes, 0)
        with tf.control_dependencies([_when(begins, lambda: _assign_all(starts, variables))]):
            update = wrapped_optimizer(self).apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([update]):
            step = steps.assign_add(1)
        with tf.control_dependencies([step]):
            return _when(tf.equal(step % passes, 0), lambda: self._combine(starts, variables, role))

    def _combine(self, starts: Sequence[Any], variables: Sequence[Any], role: str) -> Any:
        """Set each variable to its value at the start plus the Adasum of the ranks' changes."""
        ends = []
        for place, (start, variable) in enumerate(zip(starts, variables, strict=True)):
            change = variable.read_value() - start
            total = allreduce(
                change,
                device_dense=self._device,
                compression=self._compressor,
                op=Adasum,
                name=collective_name(role, str(place)),
                ignore_name_scope=True,
            )
            ends.append(start + total)
        return _assign_all(variables, ends)


def _assign_all(variables: Sequence[Any], values: Sequence[Any]) -> Any:
    return tf.group(*[v.assign(tf.convert_to_tensor(value)) for v, value in zip(variables, values, strict=True)])


def _when(condition: tf.Tensor, action: Callable[[], Any]) -> Any:
    return tf.cond(condition, action, tf.no_op)
