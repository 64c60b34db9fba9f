"""A running sum of gradients on one replica."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.gradients.sparse import sum_duplicates
from hvdtrain.state.variables import fill_memory, free_memory, unwrap


class GradientSum:
    """A running sum of gradients on this replica, in one buffer for each variable.

    A group's first gradients take the buffer's place, so nothing has to be set to zero. Of sparse gradients the rows
    that were touched are kept, each once: never more than the table.

    Args:
        variables: whose gradients are to come.
        give_back: keep no sum that was read: its memory is free as soon as it is exchanged. Not for functions that XLA
            compiles, where a variable must keep its size.
    """

    def __init__(self, variables: Sequence[Any], *, give_back: bool = False) -> None:
        self._give_back = give_back
        self._variables = [unwrap(variable) for variable in variables]
        self._buffers: list[_DenseSum | _RowList | None] | None = None

    def add(self, gradients: Sequence[Gradient], *, first: bool | tf.Tensor) -> None:
        """Add the gradients of a microbatch.

        Args:
            gradients: one for each variable; which of them are None or sparse must not change.
            first: whether they start a new sum.
        """
        if self._buffers is None:
            with eager_variables():
                self._buffers = [
                    _buffer(v, g, self._give_back) for v, g in zip(self._variables, gradients, strict=True)
                ]
        kept = [(b, g) for b, g in zip(self._buffers, gradients, strict=True) if b is not None]

        def put(*, first: bool) -> tf.Tensor:
            for buffer, gradient in kept:
                buffer.add(gradient, first=first)
            return tf.constant(True)

        if tf.is_tensor(first):
            tf.cond(first, lambda: put(first=True), lambda: put(first=False))
        else:
            put(first=bool(first))

    def read(self) -> list[Gradient]:
        """Return the sums since the last `add` that was a first one; with `give_back`, the next must be a first one."""
        if self._buffers is None:
            raise ConfigError("There is nothing to reduce: add the gradients of a microbatch first.")
        return [None if buffer is None else buffer.read() for buffer in self._buffers]


class _DenseSum:
    def __init__(self, shape: tf.TensorShape, dtype: tf.DType, give_back: bool) -> None:
        self._sum = tf.Variable(tf.zeros(shape, dtype), trainable=False, name="gradient_sum")
        self._give_back = give_back

    def add(self, gradient: Gradient, *, first: bool) -> None:
        dense = tf.convert_to_tensor(gradient)
        if not first:
            self._sum.assign_add(dense)
        elif self._give_back:
            fill_memory(self._sum, dense)
        else:
            self._sum.assign(dense)

    def read(self) -> tf.Tensor:
        whole = self._sum.read_value()
        if self._give_back:
            free_memory(self._sum)
        return whole


class _RowList:
    def __init__(self, variable: tf.Variable, gradient: tf.IndexedSlices) -> None:
        self._whole = tuple(variable.shape)
        row, dtype = variable.shape[1:], gradient.values.dtype
        shape = tf.TensorShape([None, *row])
        self._values = tf.Variable(tf.zeros([0, *row], dtype), trainable=False, shape=shape, name="gradient_rows")
        none = tf.zeros([0], gradient.indices.dtype)
        self._indices = tf.Variable(none, trainable=False, shape=tf.TensorShape([None]), name="gradient_indices")

    def add(self, gradient: tf.IndexedSlices, *, first: bool) -> None:
        if not first:
            values = tf.concat([self._values.read_value(), gradient.values], 0)
            indices = tf.concat([self._indices.read_value(), gradient.indices], 0)
            gradient = tf.IndexedSlices(values, indices, gradient.dense_shape)
        rows = sum_duplicates(gradient)
        self._values.assign(rows.values)
        self._indices.assign(rows.indices)

    def read(self) -> tf.IndexedSlices:
        return tf.IndexedSlices(self._values.read_value(), self._indices.read_value(), tf.constant(self._whole))


def _buffer(variable: tf.Variable, gradient: Gradient, give_back: bool) -> _DenseSum | _RowList | None:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return _RowList(variable, gradient)
    # The gradient may be a slice of the variable's.
    shape = gradient.shape if gradient.shape.is_fully_defined() else variable.shape
    return _DenseSum(shape, gradient.dtype, give_back)
