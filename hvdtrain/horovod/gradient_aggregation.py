"""Local gradient aggregation in graphs of TensorFlow 1, as `horovod.tensorflow.gradient_aggregation`."""

from typing import Any

from horovod.tensorflow import gradient_aggregation as _horovods
from horovod.tensorflow.gradient_aggregation import apply_op_to_not_none_tensors, get_not_none_from_list

from hvdtrain.compat.horovod import aggregation_of_present
from hvdtrain.horovod.names import global_process_set, size_op

__all__ = [
    "LocalGradientAggregationHelper",
    "apply_op_to_not_none_tensors",
    "get_not_none_from_list",
    "global_process_set",
    "size_op",
]


class LocalGradientAggregationHelper(aggregation_of_present()):  # type: ignore[misc]
    """Horovod's helper, for graphs that a session runs: sums gradients, and reduces every `backward_passes_per_step`.

    Unlike Horovod's it takes gradients that are None.
    """


def __getattr__(name: str) -> Any:
    """Return what else Horovod's module has."""
    return getattr(_horovods, name)
