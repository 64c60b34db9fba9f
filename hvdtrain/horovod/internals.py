"""Names with a leading underscore that scripts take from `horovod.tensorflow`."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import script_utilities
from hvdtrain.horovod.basics import global_process_set
from hvdtrain.horovod.collectives import allreduce, grouped_allreduce
from hvdtrain.horovod.exchange import is_included
from hvdtrain.horovod.mpi_ops import _allreduce, _grouped_allreduce, _grouped_reducescatter, _reducescatter
from hvdtrain.horovod.reduction import Reduction
from hvdtrain.horovod.tape import ReducingTape as _DistributedGradientTape
from hvdtrain.horovod.v1.adasum import AdasumOptimizer as _DistributedAdasumOptimizer
from hvdtrain.horovod.v1.optimizer import SessionOptimizer as _DistributedOptimizer

__all__ = [
    "_IS_TF2",
    "_DistributedAdasumOptimizer",
    "_DistributedGradientTape",
    "_DistributedOptimizer",
    "_LegacyOptimizer",
    "_allreduce",
    "_allreduce_cond",
    "_cache",
    "_executing_eagerly",
    "_get_default_graph",
    "_global_variables",
    "_grouped_allreduce",
    "_grouped_allreduce_cond",
    "_grouped_reducescatter",
    "_make_allreduce_grads_fn",
    "_make_subgraph",
    "_reducescatter",
]

_IS_TF2 = True
_cache, _executing_eagerly, _make_subgraph = script_utilities()
_LegacyOptimizer = tf.compat.v1.train.Optimizer
_get_default_graph = tf.compat.v1.get_default_graph
_global_variables = tf.compat.v1.global_variables


def _make_allreduce_grads_fn(
    name: str,
    device_dense: str,
    device_sparse: str,
    compression: Any,
    sparse_as_dense: bool,
    op: int,
    gradient_predivide_factor: float,
    groups: Any,
    process_set: Any,
) -> Callable[..., list[Any]]:
    """Return a function of a list of gradients, and of their variables, that reduces them."""
    reduction = Reduction(
        role=name,
        op=op,
        compression=compression,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        device_dense=device_dense or device_sparse,
    )

    def allreduce_grads(
        grads: Sequence[Any], vars: Sequence[Any] | None = None, use_generic_names: bool = False
    ) -> list[Any]:
        """Return the reduced gradients, which are always matched by position."""
        return reduction.reduce(grads, [None] * len(grads) if vars is None else vars)

    return allreduce_grads


def _allreduce_cond(tensor: Any, *args: Any, process_set: Any = global_process_set, **kwargs: Any) -> Any:
    """Reduce a tensor over the ranks of `process_set`; on other ranks return it as it is."""
    if not is_included(process_set):
        return tensor
    return allreduce(tensor, *args, **kwargs, process_set=process_set)  # type: ignore[misc]


def _grouped_allreduce_cond(
    tensors: Sequence[Any], *args: Any, process_set: Any = global_process_set, **kwargs: Any
) -> Any:
    """Reduce tensors together over the ranks of `process_set`; on other ranks return them as they are."""
    if not is_included(process_set):
        return tensors
    return grouped_allreduce(tensors, *args, **kwargs, process_set=process_set)  # type: ignore[misc]
