"""Horovod's own Python API on today's Keras: `import hvdtrain.horovod as hvd` for `import horovod.tensorflow as hvd`.

Names, signatures and semantics are those of `horovod.tensorflow` 0.28.1, on Keras 3 and, with TF_USE_LEGACY_KERAS=1, on
tf_keras. It is a thin layer over `gradients`, `layers` and `runtime`, and over Horovod's own functions where they work.
Horovod's modules have their names here, too (`mpi_ops`, `compression`, `functions` …); `v1/` is for scripts
of `tf.compat.v1`. Start with `optimizer.py`. The top room: nothing imports it, and it may import all rooms below `cli`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.compat.horovod import script_utilities
from hvdtrain.gradients.tape import ReducingTape
from hvdtrain.horovod import (
    basics,
    collectives,
    compression,
    elastic,
    functions,
    gradient_aggregation,
    mpi_ops,
    sync_batch_norm,
    util,
)
from hvdtrain.horovod.basics import *  # noqa: F403
from hvdtrain.horovod.basics import init
from hvdtrain.horovod.collectives import *  # noqa: F403
from hvdtrain.horovod.collectives import allreduce, grouped_allreduce
from hvdtrain.horovod.functions import allgather_object, broadcast_object, broadcast_object_fn, broadcast_variables
from hvdtrain.horovod.gradient_aggregation import LocalGradientAggregationHelper
from hvdtrain.horovod.mpi_ops import _allreduce as _allreduce
from hvdtrain.horovod.mpi_ops import _grouped_allreduce as _grouped_allreduce
from hvdtrain.horovod.mpi_ops import _grouped_reducescatter as _grouped_reducescatter
from hvdtrain.horovod.mpi_ops import _reducescatter as _reducescatter
from hvdtrain.horovod.names import global_process_set, is_initialized
from hvdtrain.horovod.optimizer import DistributedOptimizer
from hvdtrain.horovod.sync_batch_norm import SyncBatchNormalization
from hvdtrain.horovod.tape import DistributedGradientTape, PartialDistributedGradientTape, horovod_exchange
from hvdtrain.horovod.v1.optimizer import AdasumOptimizer, SessionOptimizer
from hvdtrain.horovod.v1.variables import BroadcastGlobalVariablesHook, broadcast_global_variables
from hvdtrain.runtime.process_sets import is_included
from hvdtrain.runtime.session import current, has_session

__all__ = [
    *basics.__all__,
    *collectives.__all__,
    "BroadcastGlobalVariablesHook",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather_object",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "compression",
    "elastic",
    "functions",
    "gradient_aggregation",
    "mpi_ops",
    "sync_batch_norm",
    "util",
]

# Names with a leading underscore that scripts take from `horovod.tensorflow`.
_DistributedAdasumOptimizer = AdasumOptimizer
_DistributedGradientTape = ReducingTape
_DistributedOptimizer = SessionOptimizer
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
    exchange = horovod_exchange(
        name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        process_set=process_set,
    )

    def allreduce_grads(
        grads: Sequence[Any], vars: Sequence[Any] | None = None, use_generic_names: bool = False
    ) -> list[Any]:
        """Return the reduced gradients, which are always matched by position."""
        return exchange.reduce(grads, [None] * len(grads) if vars is None else vars)

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


def start_beside_session() -> None:
    """Initialize Horovod where the process's session has none: in one process without a launcher."""
    if has_session() and current().environment.size == 1 and not is_initialized():
        init()


start_beside_session()
