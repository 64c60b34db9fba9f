"""Global batches as arrays, and the slice of them that a replica takes."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras import sparse_tensor
from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import nest_of
from hvdtrain.data.batch import (
    Batch,
    Change,
    as_batch,
    changed,
    check_division,
    count_of,
    map_tensors,
    rows_between,
    rows_of,
    slice_batch,
    slice_bounds,
    tensors_in,
)

CHECKED_VALUES = 64
"""About so many values of each array of a batch are compared among ranks."""


def standard(element: Any, name: str) -> Any:
    """Return a global batch as a nest of arrays [samples, …], `(inputs, targets[, sample_weight])` as a rule.

    Raises:
        DataError: another structure.
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
    arrays = map_tensors(_array, nest_of(element))
    if any(not array.shape for array in tensors_in(arrays) if isinstance(array, np.ndarray)):
        raise DataError(f"A batch of {name} holds a single number where an array [samples, …] belongs.")
    return arrays


def _array(value: Any) -> Any:
    """Return an array; of what is ragged or sparse, also SciPy's, TensorFlow's form."""
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        return value
    return sparse_tensor(value) if hasattr(value, "tocsr") else np.asarray(value)


def _length(array: Any) -> int:
    return len(array) if isinstance(array, np.ndarray) else int(rows_of(array))


@dataclass(frozen=True)
class Cut:
    """Takes a replica's slice of global batches.

    Values that hold for all full batches are Python values, so that one step is compiled for them; batches of other
    lengths share a step for any length.
    """

    batch: int
    """Samples of a full global batch; the caller has checked that they divide among the replicas."""
    index: int
    """This replica's index among `size`."""
    size: int
    name: str
    """The name of the data in messages."""
    change: Change | None = None
    """Applied to the slice."""

    def __call__(self, elements: Any) -> Batch:
        """Return this replica's slice of one global batch."""
        return self.noted(elements)[0]

    def noted(self, elements: Any) -> tuple[Batch, int]:
        """Return this replica's slice of one global batch, and a checksum of a sample of the batch's bytes."""
        arrays = standard(elements, self.name)
        return self._slice(arrays), _checksum(arrays)

    def _slice(self, arrays: Any) -> Batch:
        lengths = {_length(array) for array in tensors_in(arrays)}
        total = count_of(arrays)
        if len(lengths) > 1 or not total:
            check_division(arrays, self.size)
            batch = slice_batch(map_tensors(_as_tensor, arrays), self.index, self.size)
            return batch if self.change is None else changed(self.change, batch)
        first, last, has_samples = slice_bounds(total, self.index, self.size)
        part = map_tensors(lambda array: _as_tensor(rows_between(array, first, last)), arrays)
        part = part if self.change is None else self.change(*part)
        if total == self.batch:
            return as_batch(part, has_samples, total)
        return as_batch(part, tf.constant(has_samples), tf.constant(total))


def _as_tensor(array: Any) -> Any:
    return tf.convert_to_tensor(array) if isinstance(array, np.ndarray) else array


def _checksum(arrays: Any) -> int:
    """Return a checksum of some of the values of each array, from its beginning to its end."""
    found = 0
    for each in tf.nest.flatten(tensors_in(arrays), expand_composites=True):
        array = np.asarray(each)
        some = array.reshape(-1)[:: max(1, array.size // CHECKED_VALUES)]
        found = zlib.crc32(repr(some.tolist()).encode() if some.dtype == object else some.tobytes(), found)
    return found


def continued(content: int, checksum: int) -> int:
    """Return the checksum of batches in their order, with one more."""
    return zlib.crc32(checksum.to_bytes(4, "big"), content)
