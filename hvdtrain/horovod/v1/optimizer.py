"""Distributed optimizers of `tf.compat.v1.train`: in graphs that a session runs, in tf.function, and eagerly."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import (
    legacy_optimizer_type,
    replace_aggregation,
    replace_reduction,
    session_adasum_class,
    session_optimizer_class,
    wrapped_optimizer,
)
from hvdtrain.compat.tensorflow import session_counter, session_slot
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.gradient_exchange import groups_of
from hvdtrain.horovod.collectives import allreduce
from hvdtrain.horovod.gradient_aggregation import LocalGradientAggregationHelper
from hvdtrain.horovod.names import Adasum, Average, Compression, global_process_set, rank
from hvdtrain.horovod.tape import horovod_exchange
from hvdtrain.runtime.collectives import collective_name
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.logs import warn_on_first
from hvdtrain.state.variables import as_written

_OF_ADASUM = ("name", "use_locking", "device_dense", "device_sparse", "compression", "backward_passes_per_step")


def session_optimizer(optimizer: Any, *, op: int, process_set: Any, num_groups: int, **options: Any) -> Any:
    """Return a distributed optimizer around one of `tf.compat.v1.train`; `options` are those of `SessionOptimizer`.

    Raises:
        ConfigError: options that Horovod refuses, too.
        NotImplementedError: Adasum on a process set.
    """
    if op != Adasum:
        options["groups"] = groups_of(num_groups, options["groups"])
        return SessionOptimizer(optimizer, op=op, process_set=process_set, **options)
    if options["average_aggregated_gradients"]:
        raise ConfigError("Adasum does not support average_aggregated_gradients == True")
    if options["gradient_predivide_factor"] != 1.0:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    if process_set.process_set_id != global_process_set.process_set_id:
        raise NotImplementedError("Adasum does not support process sets yet")
    return AdasumOptimizer(optimizer, **{option: options[option] for option in _OF_ADASUM})


class SessionOptimizer(session_optimizer_class()):  # type: ignore[misc]
    """An optimizer of TensorFlow 1 whose `compute_gradients`, and so `minimize`, returns reduced gradients.

    `apply_gradients` does not reduce: gradients may be clipped between the two. Arguments are those of Horovod's
    `DistributedOptimizer`.

    Raises:
        ConfigError: `backward_passes_per_step` > 1 eagerly, or options that Horovod refuses, too.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str | None = None,
        use_locking: bool = False,
        device_dense: str = "",
        device_sparse: str = "",
        compression: Any = Compression.none,
        sparse_as_dense: bool = False,
        op: int = Average,
        gradient_predivide_factor: float = 1.0,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        groups: Any = None,
        process_set: Any = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        options = {**locals()}
        passes, averages = options.pop("backward_passes_per_step"), options.pop("average_aggregated_gradients")
        for each in ("self", "__class__", "optimizer", "name", "use_locking"):
            del options[each]
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(optimizer, name, use_locking, process_set=process_set)
        self._exchange = horovod_exchange(name, **options)
        replace_reduction(self, self._exchange.reduce)
        self._has_reduced = False
        self._helper: LocalGradientAggregationHelper | None = None
        if passes != 1:
            self._helper = self._aggregation(passes, averages)
            replace_aggregation(self, self._helper)

    def _aggregation(self, passes: int, averages: bool) -> LocalGradientAggregationHelper:
        if tf.executing_eagerly():
            raise ConfigError(
                "backward_passes_per_step > 1 is not supported for optimizers of tf.compat.v1.train with eager "
                f"execution. Received: {passes}. Build the graph within tf.Graph().as_default(), or use an optimizer "
                "of Keras."
            )
        return LocalGradientAggregationHelper(
            passes,
            self._exchange.reduce,
            self._exchange.sparse_as_dense,
            averages,
            rank(),
            legacy_optimizer_type(),
            self._exchange.process_set,
            name=self._exchange.role,
        )

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self._exchange.keep_local([var])

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return (reduced gradient, variable) pairs; the arguments are those of the wrapped optimizer."""
        self._has_reduced = True
        pairs = wrapped_optimizer(self).compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        reducer: Any = self._exchange.reduce
        if self._helper is not None:
            # Names are chosen here, where all optimizers of a graph are seen; the exchange itself is in a branch of it.
            role = numbered(self._exchange.role)
            self._helper.name = role.replace("#", "_")
            replace_reduction(self._helper, replace(self._exchange, role=role).reduce)
            reducer = self._helper.compute_gradients
        return list(zip(reducer(gradients, variables), variables, strict=True))

    @as_written
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply gradients as they are: those that `compute_gradients` returned."""
        if not self._has_reduced:
            warn_on_first(
                "apply_gradients of an optimizer of tf.compat.v1.train applies gradients as they are, and its "
                "compute_gradients, which reduces them, was never called. Use minimize or compute_gradients, or reduce "
                "the gradients with hvd.DistributedGradientTape.",
                stacklevel=2,
            )
        return super().apply_gradients(list(grads_and_vars), global_step, name)


class AdasumOptimizer(session_adasum_class()):  # type: ignore[misc]
    """An optimizer that steps with local gradients, and then combines the ranks' changes of the variables by Adasum.

    With `backward_passes_per_step` it steps that many times before the changes are combined. That of Horovod 0.28.1
    reduces nothing in `apply_gradients`.

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
