"""Gradients of a step, as its optimizers and update rules take them."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.partition.kinds import SLICE, Opaque, Rows, Slice
from hvdtrain.partition.partition import Partition, partition_here


def part_of_gradient(partition: Partition, gradient: Any) -> Any:
    """Return this rank's part of a gradient; a slice stays one."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        if isinstance(partition.kind(gradient.values), Rows | Opaque):
            return gradient
        return tf.IndexedSlices(
            partition.part(gradient.values), partition.whole(gradient.indices), gradient.dense_shape
        )
    return gradient if isinstance(partition.kind(gradient), Slice | Opaque) else partition.part(gradient)


def slice_of_gradient(gradient: Any, cut: Callable[[Any], tf.Tensor]) -> tf.Tensor:
    """Return this rank's slice of a gradient, which `cut` makes of the ranks' parts. Collective."""
    partition = partition_here()
    if partition is None:
        return cut(gradient)
    partition.cause = "the gradients"
    part = part_of_gradient(partition, gradient)
    with partition.plain():
        return partition.mark(cut(part), SLICE)
