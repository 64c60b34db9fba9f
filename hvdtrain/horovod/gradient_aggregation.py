"""Local gradient aggregation in graphs of TensorFlow 1, as `horovod.tensorflow.gradient_aggregation`."""

from collections.abc import Sequence
from typing import Any

from horovod.tensorflow import gradient_aggregation as _horovods
from horovod.tensorflow.gradient_aggregation import apply_op_to_not_none_tensors, get_not_none_from_list

from hvdtrain.horovod.basics import global_process_set, size_op

__all__ = [
    "LocalGradientAggregationHelper",
    "apply_op_to_not_none_tensors",
    "get_not_none_from_list",
    "global_process_set",
    "size_op",
]


class LocalGradientAggregationHelper(_horovods.LocalGradientAggregationHelper):
    """Horovod's helper, for graphs that a session runs: sums gradients, and reduces every `backward_passes_per_step`.

    Unlike Horovod's it takes gradients that are None.
    """

    def _allreduce_grads_helper(self, vars: Sequence[Any]) -> list[Any]:
        # Only gradients that are not None are aggregated, and Horovod matches them with `vars` by position.
        return super()._allreduce_grads_helper([v for i, v in enumerate(vars) if i in self.not_none_indexes])


def __getattr__(name: str) -> Any:
    """Return what else Horovod's module has."""
    return getattr(_horovods, name)
