"""Several tensors laid end to end in one."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Return the elements of `tensors`, of one dtype, as one vector."""
    return tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)


def unpack(flat: tf.Tensor, like: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors with the shapes of those in `like` from the elements of a vector, which may hold more."""
    sizes = [_elements(tensor) for tensor in like]
    *parts, _ = tf.split(flat, [*sizes, _elements(flat) - sum(sizes)], num=len(like) + 1)
    return [_shaped(part, tensor) for part, tensor in zip(parts, like, strict=True)]


def _elements(tensor: tf.Tensor) -> Any:
    """Return how many elements a tensor has: a number, or a tensor where only a run tells."""
    count = tensor.shape.num_elements()
    return tf.size(tensor) if count is None else count


def _shaped(part: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    if like.shape.is_fully_defined():
        return tf.reshape(part, like.shape)
    return tf.ensure_shape(tf.reshape(part, tf.shape(like)), like.shape)


def buffers(tensors: Sequence[Any], most: int) -> list[list[int]]:
    """Return the places of neighbours, tensors or variables, that fill a buffer of `most` bytes.

    What is larger, or of a size that is not known, has a buffer of its own.
    """
    found: list[list[int]] = []
    room = 0
    for place, tensor in enumerate(tensors):
        elements = tensor.shape.num_elements()
        size = most + 1 if elements is None else elements * tensor.dtype.size
        if size > room or not found:
            found.append([])
            room = most
        found[-1].append(place)
        room -= size
    return found
