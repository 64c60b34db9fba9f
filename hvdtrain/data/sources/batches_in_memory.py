"""Batches of a user's tf.data.Dataset, PyDataset or generator, read once into memory."""

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.streams.global_batches import standard
from hvdtrain.data.streams.python_batches import each_once, is_stream

CHUNK = 256
"""Unbatched samples of a Dataset read at a time."""


def gives_batches(data: Any) -> bool:
    """Whether `data` is a Dataset, PyDataset, generator or generator function, not arrays."""
    return isinstance(data, tf.data.Dataset) or inspect.isgenerator(data) or is_stream(data)


def in_memory(data: Any, name: str) -> ArraySource:
    """Read all of `data` and return its samples, in order.

    A Dataset may also be unbatched, which shows by a scalar tensor or by different first dims. Random transformations
    are drawn once, here.

    Args:
        data: batches `(inputs, targets[, sample_weight])`, of any sizes; see `gives_batches`.
        name: the name of the data in messages.

    Raises:
        DataError: the data never end, are empty, have another structure, or samples of different shapes or dtypes.
    """
    batches = [standard(batch, name) for batch in _batches(data, name)]
    if not batches:
        raise DataError(f"{name} holds no samples.")
    if not isinstance(batches[0], tuple):
        raise DataError(f"{name} must give batches (inputs, targets) or (inputs, targets, sample_weight).")
    return ArraySource(_joined(batches, name), name)


def _batches(data: Any, name: str) -> Iterator[Any]:
    endless = f"{name} never ends and cannot be held: use take(), or leave out --cache and pass --steps-per-epoch N."
    if isinstance(data, tf.data.Dataset):
        if data.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise DataError(endless)
        return (data if _is_batched(data.element_spec) else data.batch(CHUNK)).as_numpy_iterator()
    if isinstance(data, keras.utils.PyDataset) and data.num_batches is None:
        raise DataError(endless)
    return data if inspect.isgenerator(data) else each_once(data)


def _is_batched(spec: Any) -> bool:
    shapes = [part.shape for part in tf.nest.flatten(spec)]
    if any(shape.rank == 0 for shape in shapes):
        return False
    return len({shape[0] for shape in shapes if shape.rank is not None}) <= 1


def _joined(batches: list[tuple[Any, ...]], name: str) -> tuple[Any, ...]:
    first = batches[0]
    kinds = _kinds(first)
    for number, batch in enumerate(batches):
        if (mine := _kinds(batch)) != kinds:
            raise DataError(f"Batch {number} of {name} holds {mine}, and the first one {kinds}.")
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches)


def _kinds(batch: tuple[Any, ...]) -> str:
    """Return the nest of dtypes and shapes of the samples of a batch."""
    return str(tf.nest.map_structure(lambda array: f"{array.dtype}{list(array.shape[1:])}", batch))
