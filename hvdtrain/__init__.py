"""Train TensorFlow and Keras 3 models on many processes with Horovod.

The names below are all there is to the public API; each is imported when it is first used, so that importing
`hvdtrain` loads neither TensorFlow nor Horovod.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hvdtrain.api import broadcast_variables, init, local_rank, rank, size
    from hvdtrain.layers.recompute import Recompute
    from hvdtrain.layers.sync_batch_norm import SyncBatchNormalization
    from hvdtrain.optim.lars import LARS
    from hvdtrain.optim.rates import learning_rate_schedule
    from hvdtrain.optim.weight_decay import decaying_weights_only
    from hvdtrain.training.accumulation import GradientAccumulator
    from hvdtrain.training.optimizer import DistributedOptimizer
    from hvdtrain.training.precision import LossScaleOptimizer
    from hvdtrain.training.tape import DistributedGradientTape
    from hvdtrain.training.trainer import Trainer

_PUBLIC = {
    "DistributedGradientTape": "hvdtrain.training.tape",
    "DistributedOptimizer": "hvdtrain.training.optimizer",
    "GradientAccumulator": "hvdtrain.training.accumulation",
    "LARS": "hvdtrain.optim.lars",
    "LossScaleOptimizer": "hvdtrain.training.precision",
    "Recompute": "hvdtrain.layers.recompute",
    "SyncBatchNormalization": "hvdtrain.layers.sync_batch_norm",
    "Trainer": "hvdtrain.training.trainer",
    "broadcast_variables": "hvdtrain.api",
    "decaying_weights_only": "hvdtrain.optim.weight_decay",
    "init": "hvdtrain.api",
    "learning_rate_schedule": "hvdtrain.optim.rates",
    "local_rank": "hvdtrain.api",
    "rank": "hvdtrain.api",
    "size": "hvdtrain.api",
}

__all__ = [
    "DistributedGradientTape",
    "DistributedOptimizer",
    "GradientAccumulator",
    "LARS",
    "LossScaleOptimizer",
    "Recompute",
    "SyncBatchNormalization",
    "Trainer",
    "broadcast_variables",
    "decaying_weights_only",
    "init",
    "learning_rate_schedule",
    "local_rank",
    "rank",
    "size",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that holds it (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted([*__all__, "__version__"])
