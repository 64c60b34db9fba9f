"""Train TensorFlow and Keras 3 models on many processes with Horovod.

The names below are all there is to the public API; each is imported when it is first used, so that importing
`hvdtrain` loads neither TensorFlow nor Horovod.
"""

import importlib
from typing import TYPE_CHECKING, Any

from hvdtrain.runtime.startup import import_tensorflow, prepare_streams

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hvdtrain.api import (
        barrier,
        broadcast_object,
        broadcast_variables,
        cross_rank,
        gather_object,
        init,
        is_initialized,
        local_rank,
        local_size,
        rank,
        rank_zero_only,
        shutdown,
        size,
        trace_step,
    )
    from hvdtrain.config.checkpoint import Checkpoint
    from hvdtrain.data.own_loops import ShardedOrder, shard
    from hvdtrain.export.adapters import load_lora, lora, merge_lora, save_lora
    from hvdtrain.export.channels import take_out_channels
    from hvdtrain.export.fake_quantization import fake_quantize, finish_fake_quantize
    from hvdtrain.export.pruning import finish_pruning, prune
    from hvdtrain.gradients.accumulator import GradientAccumulator
    from hvdtrain.gradients.collectives import (
        all_gather,
        allgather,
        allreduce,
        alltoall,
        broadcast,
        grouped_allreduce,
        reducescatter,
    )
    from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
    from hvdtrain.gradients.tape import DistributedGradientTape
    from hvdtrain.gradients.whole_batch import whole_batch
    from hvdtrain.layers.attention import DotProductAttention
    from hvdtrain.layers.embedding import ShardedEmbedding
    from hvdtrain.layers.experts import MixtureOfExperts
    from hvdtrain.layers.recompute import Recompute
    from hvdtrain.layers.sync_batch_norm import SyncBatchNormalization
    from hvdtrain.observability.mlflow_tracker import MlflowTracker
    from hvdtrain.observability.wandb_tracker import WandbTracker
    from hvdtrain.optim.lars import LARS
    from hvdtrain.optim.optimizers import decaying_weights_only
    from hvdtrain.optim.precision import LossScaleOptimizer
    from hvdtrain.optim.schedules import learning_rate_schedule
    from hvdtrain.parallel.parallelize import parallelize
    from hvdtrain.parallel.tensor.cuts import FusedHeads
    from hvdtrain.run_function import run
    from hvdtrain.runs.loaded import LoadedRun, load_run
    from hvdtrain.training.trainer import Trainer

_PUBLIC = {
    "Checkpoint": "hvdtrain.config.checkpoint",
    "DistributedGradientTape": "hvdtrain.gradients.tape",
    "DistributedOptimizer": "hvdtrain.gradients.distributed_optimizer",
    "FusedHeads": "hvdtrain.parallel.tensor.cuts",
    "GradientAccumulator": "hvdtrain.gradients.accumulator",
    "LARS": "hvdtrain.optim.lars",
    "LoadedRun": "hvdtrain.runs.loaded",
    "LossScaleOptimizer": "hvdtrain.optim.precision",
    "DotProductAttention": "hvdtrain.layers.attention",
    "MixtureOfExperts": "hvdtrain.layers.experts",
    "MlflowTracker": "hvdtrain.observability.mlflow_tracker",
    "Recompute": "hvdtrain.layers.recompute",
    "ShardedEmbedding": "hvdtrain.layers.embedding",
    "ShardedOrder": "hvdtrain.data.own_loops",
    "SyncBatchNormalization": "hvdtrain.layers.sync_batch_norm",
    "Trainer": "hvdtrain.training.trainer",
    "WandbTracker": "hvdtrain.observability.wandb_tracker",
    "all_gather": "hvdtrain.gradients.collectives",
    "allgather": "hvdtrain.gradients.collectives",
    "allreduce": "hvdtrain.gradients.collectives",
    "alltoall": "hvdtrain.gradients.collectives",
    "barrier": "hvdtrain.api",
    "broadcast": "hvdtrain.gradients.collectives",
    "broadcast_object": "hvdtrain.api",
    "broadcast_variables": "hvdtrain.api",
    "cross_rank": "hvdtrain.api",
    "decaying_weights_only": "hvdtrain.optim.optimizers",
    "fake_quantize": "hvdtrain.export.fake_quantization",
    "finish_fake_quantize": "hvdtrain.export.fake_quantization",
    "finish_pruning": "hvdtrain.export.pruning",
    "gather_object": "hvdtrain.api",
    "grouped_allreduce": "hvdtrain.gradients.collectives",
    "init": "hvdtrain.api",
    "is_initialized": "hvdtrain.api",
    "learning_rate_schedule": "hvdtrain.optim.schedules",
    "load_lora": "hvdtrain.export.adapters",
    "load_run": "hvdtrain.runs.loaded",
    "local_rank": "hvdtrain.api",
    "local_size": "hvdtrain.api",
    "lora": "hvdtrain.export.adapters",
    "merge_lora": "hvdtrain.export.adapters",
    "parallelize": "hvdtrain.parallel.parallelize",
    "prune": "hvdtrain.export.pruning",
    "rank": "hvdtrain.api",
    "rank_zero_only": "hvdtrain.api",
    "reducescatter": "hvdtrain.gradients.collectives",
    "run": "hvdtrain.run_function",
    "save_lora": "hvdtrain.export.adapters",
    "shard": "hvdtrain.data.own_loops",
    "shutdown": "hvdtrain.api",
    "size": "hvdtrain.api",
    "take_out_channels": "hvdtrain.export.channels",
    "trace_step": "hvdtrain.api",
    "whole_batch": "hvdtrain.gradients.whole_batch",
}

_WITHOUT_TENSORFLOW = ("hvdtrain.api", "hvdtrain.config.checkpoint", "hvdtrain.run_function")

__all__ = [
    "Checkpoint",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "DotProductAttention",
    "FusedHeads",
    "GradientAccumulator",
    "LARS",
    "LoadedRun",
    "LossScaleOptimizer",
    "MixtureOfExperts",
    "MlflowTracker",
    "Recompute",
    "ShardedEmbedding",
    "ShardedOrder",
    "SyncBatchNormalization",
    "Trainer",
    "WandbTracker",
    "all_gather",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "decaying_weights_only",
    "fake_quantize",
    "finish_fake_quantize",
    "finish_pruning",
    "gather_object",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "learning_rate_schedule",
    "load_lora",
    "load_run",
    "local_rank",
    "local_size",
    "lora",
    "merge_lora",
    "parallelize",
    "prune",
    "rank",
    "rank_zero_only",
    "reducescatter",
    "run",
    "save_lora",
    "shard",
    "shutdown",
    "size",
    "take_out_channels",
    "trace_step",
    "whole_batch",
]

prepare_streams()


def __getattr__(name: str) -> Any:
    """Import a public name from the module that holds it (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    if _PUBLIC[name] not in _WITHOUT_TENSORFLOW:
        import_tensorflow()
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])
