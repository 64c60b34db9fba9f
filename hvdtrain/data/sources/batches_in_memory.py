"""Batches that a user's tf.data.Dataset, PyDataset or generator gives, read once and then held in memory."""

import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.global_batches import standard
from hvdtrain.data.streams import each_once, is_stream

CHUNK = 256
"""Single samples of a Dataset that are read at a time."""


def gives_batches(data: Any) -> bool:
    """Tell a Dataset, PyDataset, generator or generator function from arrays."""
    return isinstance(data, tf.data.Dataset) or inspect.isgenerator(data) or is_stream(data)


def in_memory(data: Any, name: str) -> ArraySource:
    """Read `data` to their end and return their samples, in their order.

    A Dataset may give single samples, too: it does where one of their tensors has no dims, or where the first dims
    differ. What draws at random has drawn when this returns.

    Args:
        data: batches `(inputs, targets[, sample_weight])`, of any sizes; see `gives_batches`.
        name: what messages call them.

    Raises:
        DataError: they never end, or give no batches, batches of another form, or samples that differ in shape or type.
    """
    batches = [standard(batch, name) for batch in _batches(data, name)]
    if not batches:
        raise DataError(f"{name} holds no samples.")
    return ArraySource(_joined(batches, name), name)


def _batches(data: Any, name: str) -> Iterator[Any]:
    endless = f"{name} never ends: use take(), or fit(…, steps_per_epoch=N) in a script of your own."
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
    """Say what the samples of a batch are: their nest with types and shapes."""
    return str(tf.nest.map_structure(lambda array: f"{array.dtype}{list(array.shape[1:])}", batch))
