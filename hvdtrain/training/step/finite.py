"""Finiteness of tensors, as a number that can be summed over replicas."""

from typing import Any

import tensorflow as tf

from hvdtrain.gradients.reduction import Gradient


def zero_if_finite(tensors: list[Any]) -> tf.Tensor:
    """Return 0 if all floating-point tensors are finite, else NaN.

    A sum is finite if its terms are, short of overflow; it takes one pass without a mask in memory.
    """
    sums = [_wide_sum(tensor) for tensor in tensors if tf.is_tensor(tensor) and tensor.dtype.is_floating]
    return 0.0 * tf.add_n(sums) if sums else tf.constant(0.0)


def _wide_sum(tensor: Any) -> tf.Tensor:
    narrow = tensor.dtype.size < 4
    return tf.cast(tf.reduce_sum(tf.cast(tensor, tf.float32) if narrow else tensor), tf.float32)


def poison_of(gradient: Gradient) -> tf.Tensor:
    """Return 0 for a finite gradient (None counts as zeros), else NaN."""
    if gradient is None:
        return tf.constant(0.0)
    return zero_if_finite([gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient])
