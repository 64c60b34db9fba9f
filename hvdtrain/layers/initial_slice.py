"""Initial values of a slice of a variable: those that the whole would have there, which is never drawn."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tensorflow as tf

from hvdtrain.runtime.placement import Box

_PHILOX = 1
"""TensorFlow's number of the generator Philox (Salmon et al. 2011): 128 random bits of each value of its counter."""
_AT_ONCE = 2**20
"""Elements of whole rows that are drawn at once where a slice of their columns is kept."""


def draw_anew(variable: Any, initializer: Any) -> None:
    """Give a Keras variable another initial value; one that is drawn when it is needed is drawn by `initializer`."""
    draw_by = getattr(variable, "draw_by", None)
    if draw_by is not None:
        draw_by(initializer)
    else:
        variable.assign(initializer(variable.shape, dtype=variable.dtype))


@dataclass
class UniformSlice:
    """An initializer of variables that hold a slice; see `uniform_slice`."""

    shape: tuple[int, ...]
    box: Box
    seed: int
    bound: float

    def __call__(self, _: Any, dtype: str) -> tf.Tensor:
        """Return the slice, whatever shape is asked for."""
        return uniform_slice(self.shape, self.box, seed=self.seed, bound=self.bound, dtype=dtype)


def uniform_slice(shape: Sequence[int], box: Sequence[slice], *, seed: int, bound: float, dtype: str) -> tf.Tensor:
    """Return a slice of what `keras.initializers.RandomUniform(-bound, bound, seed)` draws for the whole tensor.

    No more is in memory than the slice and a million elements.

    Args:
        shape: of the whole tensor.
        box: the slice: one Python slice with start and stop for each dim.
        seed: of this tensor.
        bound: of the values.
        dtype: of the values.
    """
    columns, others = prod(shape[1:]), tuple(box[1:])
    all_of_a_row = others == tuple(slice(0, size) for size in shape[1:])
    most = max(1, _AT_ONCE // max(1, columns))
    pieces = []
    for begin, end in [(box[0].start, box[0].stop)] if all_of_a_row else _chunks(box[0], most):
        flat = uniform_range(begin * columns, (end - begin) * columns, seed=seed, bound=bound, dtype=dtype)
        pieces.append(tf.reshape(flat, [end - begin, *shape[1:]])[(slice(None), *others)])
    return tf.concat(pieces, 0) if pieces else tf.zeros([part.stop - part.start for part in box], dtype)


def _chunks(rows: slice, most: int) -> Iterator[tuple[int, int]]:
    for begin in range(rows.start, rows.stop, most):
        yield begin, min(begin + most, rows.stop)


def uniform_range(first: int, count: int, *, seed: int, bound: float, dtype: str) -> tf.Tensor:
    """Return elements `first` to `first + count` of what Keras draws for a tensor of that size or any larger one.

    Its generator makes numbers of a counter, which may begin anywhere.
    """
    kind = tf.as_dtype(dtype)
    each = 2 if kind == tf.float64 else 4
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=tf.constant([seed, 0]))
    counter += tf.constant([first // each, 0], tf.uint64)
    before = first % each
    values = tf.raw_ops.StatelessRandomUniformV2(
        shape=[before + count], key=key, counter=counter, alg=_PHILOX, dtype=kind
    )
    low, high = (tf.cast(tf.constant(edge, tf.float32), kind) for edge in (-bound, bound))  # as Keras rounds them
    return values[before:] * (high - low) + low
