"""Distributed optimizers of `tf.compat.v1.train`: in graphs that a session runs, in tf.function, and eagerly."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import (
    legacy_optimizer_type,
    replace_aggregation,
    replace_reduction,
    session_optimizer_class,
    wrapped_optimizer,
)
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Adasum, Average, Compression, global_process_set, rank
from hvdtrain.horovod.gradient_aggregation import LocalGradientAggregationHelper
from hvdtrain.horovod.reduction import Reduction
from hvdtrain.horovod.v1.adasum import AdasumOptimizer
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.warning import warn_on_first
from hvdtrain.state.variables import as_written

_OF_ADASUM = ("name", "use_locking", "device_dense", "device_sparse", "compression", "backward_passes_per_step")


def session_optimizer(optimizer: Any, op: int, process_set: Any, **options: Any) -> Any:
    """Return a distributed optimizer around one of `tf.compat.v1.train`; `options` are those of `SessionOptimizer`.

    Raises:
        ConfigError: options that Horovod refuses, too.
        NotImplementedError: Adasum on a process set.
    """
    if op != Adasum:
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
        name = name or f"Distributed{type(optimizer).__name__}"
        super().__init__(optimizer, name, use_locking, process_set=process_set)
        self._reduction = Reduction(
            role=name,
            op=op,
            compression=compression,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            predivide=gradient_predivide_factor,
            process_set=process_set,
            scale_local=scale_local_gradients,
            device_dense=device_dense or device_sparse,
        )
        replace_reduction(self, self._reduction.reduce)
        self._has_reduced = False
        self._helper: LocalGradientAggregationHelper | None = None
        if backward_passes_per_step != 1:
            self._helper = self._aggregation(backward_passes_per_step, average_aggregated_gradients)
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
            self._reduction.reduce,
            self._reduction.sparse_as_dense,
            averages,
            rank(),
            legacy_optimizer_type(),
            self._reduction.process_set,
            name=self._reduction.role,
        )

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self._reduction.keep_local([var])

    @as_written
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Return (reduced gradient, variable) pairs; the arguments are those of the wrapped optimizer."""
        self._has_reduced = True
        pairs = wrapped_optimizer(self).compute_gradients(*args, **kwargs)
        gradients, variables = zip(*pairs, strict=True)
        helper = self._helper
        reduced = (
            self._reduction.reduce(gradients, variables)
            if helper is None
            else self._aggregated(helper, gradients, variables)
        )
        return list(zip(reduced, variables, strict=True))

    def _aggregated(
        self, helper: LocalGradientAggregationHelper, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> list[Any]:
        """Reduce in every last of several passes.

        Names are chosen here, where all optimizers of a graph are seen; the exchange itself is in a branch of it.
        """
        role = numbered(self._reduction.role)
        helper.name = role.replace("#", "_")
        replace_reduction(helper, replace(self._reduction, role=role).reduce)
        return list(helper.compute_gradients(gradients, variables))

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
