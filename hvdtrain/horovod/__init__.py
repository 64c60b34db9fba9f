"""Horovod's own Python API on today's Keras: `import hvdtrain.horovod as hvd` for `import horovod.tensorflow as hvd`.

Names, signatures and semantics are those of `horovod.tensorflow` 0.28.1, on Keras 3 and, with TF_USE_LEGACY_KERAS=1, on
tf_keras. It is a thin layer over `gradients`, `layers` and `runtime`, and over Horovod's own functions where they work.
Horovod's modules have their names here, too (`mpi_ops`, `compression`, `data.compute_service` …); `v1/` is for scripts
of `tf.compat.v1`. Start with `optimizer.py`. The top room: nothing imports it, and it may import all rooms below `cli`.
"""

from hvdtrain.horovod import compression, elastic, functions, gradient_aggregation, mpi_ops, sync_batch_norm, util
from hvdtrain.horovod.basics import (
    Adasum,
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    ccl_built,
    check_extension,
    check_num_rank_power_of_2,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    gpu_available,
    handle_average_backwards_compatibility,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_rank_op,
    local_size,
    local_size_op,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_included_op,
    rank,
    rank_op,
    refs_to_vars,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    size_op,
    split_list,
    start_timeline,
    stop_timeline,
    vars_to_refs,
)
from hvdtrain.horovod.collectives import (
    allgather,
    allreduce,
    alltoall,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from hvdtrain.horovod.gradient_aggregation import LocalGradientAggregationHelper
from hvdtrain.horovod.internals import (
    _IS_TF2 as _IS_TF2,
)
from hvdtrain.horovod.internals import (
    _allreduce as _allreduce,
)
from hvdtrain.horovod.internals import (
    _allreduce_cond as _allreduce_cond,
)
from hvdtrain.horovod.internals import (
    _cache as _cache,
)
from hvdtrain.horovod.internals import (
    _DistributedAdasumOptimizer as _DistributedAdasumOptimizer,
)
from hvdtrain.horovod.internals import (
    _DistributedGradientTape as _DistributedGradientTape,
)
from hvdtrain.horovod.internals import (
    _DistributedOptimizer as _DistributedOptimizer,
)
from hvdtrain.horovod.internals import (
    _executing_eagerly as _executing_eagerly,
)
from hvdtrain.horovod.internals import (
    _get_default_graph as _get_default_graph,
)
from hvdtrain.horovod.internals import (
    _global_variables as _global_variables,
)
from hvdtrain.horovod.internals import (
    _grouped_allreduce as _grouped_allreduce,
)
from hvdtrain.horovod.internals import (
    _grouped_allreduce_cond as _grouped_allreduce_cond,
)
from hvdtrain.horovod.internals import (
    _grouped_reducescatter as _grouped_reducescatter,
)
from hvdtrain.horovod.internals import (
    _LegacyOptimizer as _LegacyOptimizer,
)
from hvdtrain.horovod.internals import (
    _make_allreduce_grads_fn as _make_allreduce_grads_fn,
)
from hvdtrain.horovod.internals import (
    _make_subgraph as _make_subgraph,
)
from hvdtrain.horovod.internals import (
    _reducescatter as _reducescatter,
)
from hvdtrain.horovod.objects import allgather_object, broadcast_object, broadcast_object_fn
from hvdtrain.horovod.optimizer import DistributedOptimizer
from hvdtrain.horovod.sync_batch_norm import SyncBatchNormalization
from hvdtrain.horovod.tape import DistributedGradientTape, PartialDistributedGradientTape
from hvdtrain.horovod.v1.variables import BroadcastGlobalVariablesHook, broadcast_global_variables
from hvdtrain.horovod.variables import broadcast_variables

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LocalGradientAggregationHelper",
    "Max",
    "Min",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_extension",
    "check_num_rank_power_of_2",
    "compression",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "functions",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "gradient_aggregation",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_ops",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "refs_to_vars",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "split_list",
    "start_timeline",
    "stop_timeline",
    "sync_batch_norm",
    "util",
    "vars_to_refs",
]
