"""Horovod's helper for local gradient aggregation in TensorFlow 1 graphs."""

from collections.abc import Callable
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import global_process_set


class LocalGradientAggregationHelper:
    """Placeholder for a helper that only works in TensorFlow 1 graphs; raises on construction."""

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
