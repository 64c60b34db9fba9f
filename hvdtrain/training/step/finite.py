"""Finiteness of tensors, as a number that can be summed over replicas."""

from typing import Any

import tensorflow as tf

from hvdtrain.gradients.reduction import Gradient


def zero_if_finite(tensors: list[Any]) -> tf.Tensor:
    """Return 0 if all floating-point tensors are finite, else NaN.

    A sum is finite if its terms are, short of overflow; it takes one pass without a mask in memory.
    """
    floating = [each for each in tensors if tf.is_tensor(each) and each.dtype.is_floating]
    # One constant for all of a rank: a model has hundreds of variables, and each operation takes a while to trace.
    ranks = {each.shape.rank for each in floating} - {None}
    axes = {rank: tf.constant(list(range(rank)), tf.int32) for rank in ranks}
    sums = [_wide_sum(each, axes.get(each.shape.rank)) for each in floating]
    return 0.0 * tf.add_n(sums) if sums else tf.constant(0.0)


def _wide_sum(tensor: Any, axes: tf.Tensor | None) -> tf.Tensor:
    narrow = tensor.dtype.size < 4
    return tf.cast(tf.reduce_sum(tf.cast(tensor, tf.float32) if narrow else tensor, axes), tf.float32)


def poison_of(gradient: Gradient) -> tf.Tensor:
    """Return 0 for a finite gradient (None counts as zeros), else NaN."""
    if gradient is None:
        return tf.constant(0.0)
    return zero_if_finite([gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient])
