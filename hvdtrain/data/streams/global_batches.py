"""Global batches from Python code: normalizing their structure, and slicing them."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch, as_batch, slice_bounds

Elements = tuple[Any, ...]


def standard(element: Any, name: str) -> Any:
    """Return a global batch as a nest of arrays [samples, …], `(inputs, targets[, sample_weight])` as a rule.

    Raises:
        DataError: another structure, no samples, or arrays of different lengths.
    """
    if isinstance(element, list) and any(hasattr(part, "shape") for part in element):
        element = tuple(element)
    while isinstance(element, tuple) and len(element) > 1 and element[-1] is None:
        element = element[:-1]
    usable = bool(element) if isinstance(element, tuple | dict) else hasattr(element, "shape")
    if not usable:
        raise DataError(
            f"{name} must give batches (inputs, targets), (inputs, targets, sample_weight) or inputs alone. "
            f"Received: {type(element).__name__}{f' of {len(element)}' if hasattr(element, '__len__') else ''}."
        )
    arrays = tf.nest.map_structure(np.asarray, _nest(element))
    lengths = {len(array) if array.ndim else 0 for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1 or 0 in lengths:
        raise DataError(f"A batch of {name} has arrays of {', '.join(map(str, sorted(lengths)))} samples.")
    return arrays


class Cut:
    """Takes a replica's slice of global batches.

    Values that hold for all full batches are Python values, so that one step is compiled for them; batches of other
    lengths share a step for any length.

    Args:
        batch: samples of a full global batch.
        index: this replica's index among `size`.
        size: number of replicas.
        name: the name of the data in messages.
    """

    def __init__(self, batch: int, index: int, size: int, name: str) -> None:
        self._batch = batch
        self._index = index
        self._size = size
        self._name = name

    def __call__(self, elements: Any) -> Batch:
        """Return this replica's slice of one global batch."""
        arrays = standard(elements, self._name)
        total = len(tf.nest.flatten(arrays)[0])
        first, last, has_samples = slice_bounds(total, self._index, self._size)
        part = tf.nest.map_structure(lambda array: tf.convert_to_tensor(array[first:last]), arrays)
        if total == self._batch:
            return as_batch(part, has_samples, total)
        return as_batch(part, tf.constant(has_samples), tf.constant(total))


def _nest(part: Any) -> Any:
    """Turn lists of arrays into tuples, and lists of numbers into arrays."""
    if isinstance(part, dict):
        return {key: _nest(value) for key, value in part.items()}
    if isinstance(part, list) and not any(hasattr(entry, "shape") for entry in part):
        return np.asarray(part)
    return tuple(map(_nest, part)) if isinstance(part, list | tuple) else part
