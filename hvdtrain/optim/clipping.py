"""Gradient clipping, dense and sparse."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.config.training import ClippingConfig

SUMMED_AT_ONCE = 4096
"""Elements summed by one thread."""


@dataclass(frozen=True)
class Clipping:
    """Bounds on the gradient of the global batch; None: unbounded.

    Keras' own clipping skips sparse gradients, and clips scaled gradients unless the optimizer is inside a
    LossScaleOptimizer.
    """

    norm: float | None = None
    """Bound on the L2 norm over all variables together (Pascanu et al. 2013)."""
    value: float | None = None
    """Bound on the absolute value of each element."""

    def __post_init__(self) -> None:
        ClippingConfig(clip_norm=self.norm, clip_value=self.value)

    def apply(self, gradients: Sequence[Any], norm: tf.Tensor | None, scale: Any = 1.0) -> list[Any]:
        """Clip `gradients` to the bounds times `scale`; `norm` is their global norm, if bounded."""
        if self.norm is not None:
            return clip_by_norm(gradients, norm, scale * self.norm)
        if self.value is not None:
            return clip_by_value(gradients, scale * self.value)
        return list(gradients)


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the L2 norm over all gradients together, a float64 scalar; None counts as zero.

    Rows of a sparse gradient must have distinct indices, as after a reduction.
    """
    return tf.sqrt(square_sum(gradients))


def square_sum(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the sum of squares of all elements, a float64 scalar. Same inputs as `global_norm`.

    With few operations for each gradient: a model has hundreds, and each operation takes a while to trace.
    """
    small: dict[tf.DType, list[tf.Tensor]] = {}
    sums: dict[tf.DType, list[tf.Tensor]] = {}
    for each in gradients:
        if each is None:
            continue
        rows = isinstance(each, tf.IndexedSlices)
        values = _at_least_32_bits(each.values if rows else each)
        elements = values.shape.num_elements()
        if rows or elements is None or elements > SUMMED_AT_ONCE:
            sums.setdefault(values.dtype, []).append(_partial_sums_of_squares(values))
        else:
            small.setdefault(values.dtype, []).append(values if values.shape.rank == 1 else tf.reshape(values, [-1]))
    for dtype, vectors in small.items():
        sums.setdefault(dtype, []).append(_partial_sums_of_squares(tf.concat(vectors, 0)))
    found = [tf.cast(tf.concat(vectors, 0), tf.float64) for vectors in sums.values()]
    return _sum_of(tf.concat(found, 0)) if found else tf.constant(0.0, tf.float64)


def ordered_sum(scalars: Sequence[tf.Tensor]) -> tf.Tensor:
    """Sum scalars of one dtype, bitwise the same on every rank.

    TensorFlow's AddN sums three or more in an order that depends on free buffers, so on timing. Grappler turns a chain
    of additions into an AddN.
    """
    return tf.reduce_sum(tf.stack(list(scalars)))


def sum_of_squares(tensor: tf.Tensor) -> tf.Tensor:
    """Return the float64 sum of squares, bitwise independent of thread counts.

    TensorFlow splits one large sum among its threads, and the rounding depends on their number: hosts with different
    core counts would scale the same gradient differently.
    """
    tensor = _at_least_32_bits(tensor)
    elements = tensor.shape.num_elements()
    if elements is not None and elements <= SUMMED_AT_ONCE:
        return tf.cast(tf.reduce_sum(tf.square(tensor)), tf.float64)
    return _sum_of(tf.cast(_partial_sums_of_squares(tensor), tf.float64))


def _at_least_32_bits(tensor: tf.Tensor) -> tf.Tensor:
    return tf.cast(tensor, tf.float32) if tensor.dtype.size < 4 else tensor  # squares of 256 are beyond float16


def _sum_of(sums: tf.Tensor) -> tf.Tensor:
    """Return the sum of partial sums [n]: of a table of 10^9 elements these are enough to be split among threads."""
    elements = sums.shape[0]
    known = elements is not None and elements <= SUMMED_AT_ONCE
    return tf.reduce_sum(sums if known else _partial_sums(sums))


def _partial_sums_of_squares(tensor: tf.Tensor) -> tf.Tensor:
    elements = tensor.shape.num_elements()
    if elements is None or elements % SUMMED_AT_ONCE:
        return _partial_sums(tf.reshape(tf.square(tensor), [-1]))
    return tf.reduce_sum(tf.square(tf.reshape(tensor, [-1, SUMMED_AT_ONCE])), axis=1)


def _partial_sums(values: tf.Tensor) -> tf.Tensor:
    """Return the sums of `SUMMED_AT_ONCE` of the `values` [n] each, and of the rest."""
    elements = values.shape[0]
    # Fewer operations where their number is known: a model has hundreds of variables, and each operation is traced.
    count = tf.size(values, out_type=tf.int64) if elements is None else elements
    whole = count // SUMMED_AT_ONCE * SUMMED_AT_ONCE
    if elements is not None and whole == elements:
        return tf.reduce_sum(tf.reshape(values, [-1, SUMMED_AT_ONCE]), axis=1)
    rows, rest = tf.slice(values, [0], [whole]), tf.slice(values, [whole], [count - whole])  # a split copies
    sums = tf.reduce_sum(tf.reshape(rows, [-1, SUMMED_AT_ONCE]), axis=1)
    return tf.concat([sums, tf.reduce_sum(rest, keepdims=True)], axis=0)


def clip_by_norm(gradients: Sequence[Any], norm: Any, bound: Any) -> list[Any]:
    """Scale `gradients` of global norm `norm` to at most `bound`; NaN and inf pass through."""
    bound = _as_scalar(bound, norm.dtype)
    factor = bound / tf.maximum(norm, bound)
    return [_on_values(g, lambda t: t * tf.cast(factor, t.dtype)) for g in gradients]


def clip_by_value(gradients: Sequence[Any], bound: Any) -> list[Any]:
    """Clip each element to [-bound, bound]; NaN and inf pass through, as they signal an overflow."""

    def clip(tensor: tf.Tensor) -> tf.Tensor:
        limit = _as_scalar(bound, tensor.dtype)
        return tf.where(tf.math.is_finite(tensor), tf.clip_by_value(tensor, -limit, limit), tensor)

    return [_on_values(gradient, clip) for gradient in gradients]


def _as_scalar(number: Any, dtype: tf.DType) -> tf.Tensor:
    # tf.cast would take a Python number through float32.
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def _on_values(gradient: Any, function: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)
