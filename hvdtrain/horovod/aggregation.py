"""Horovod's helper for adding up gradients in graphs of TensorFlow 1."""

from collections.abc import Callable
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import global_process_set


class LocalGradientAggregationHelper:
    """Stands for a helper that works in TensorFlow 1's graphs only, and raises at once."""

    def __init__(
        self,
        backward_passes_per_step: int,
        allreduce_func: Callable[..., Any],
        sparse_as_dense: bool,
        average_aggregated_gradients: bool,
        rank: int,
        optimizer_type: Any,
        process_set: Any = global_process_set,
        scale_local_gradients: bool = True,
        name: str = "",
    ) -> None:
        raise ConfigError(
            "LocalGradientAggregationHelper works in graphs of TensorFlow 1 only. Use "
            f"hvd.DistributedOptimizer(optimizer, backward_passes_per_step={backward_passes_per_step}), or "
            "hvdtrain.GradientAccumulator in a loop of your own."
        )
