"""A user's batches that are read as training goes on, as one of the splits of a run."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError, opt
from hvdtrain.data.streams.given import content_of
from hvdtrain.data.streams.global_batches import standard
from hvdtrain.data.streams.python_batches import opened
from hvdtrain.data.streams.sharded_dataset import batch_size_of


class StreamSource:
    """A tf.data.Dataset, PyDataset or generator function of `(inputs, targets[, sample_weight])`.

    It has what of `Source` does not need a number of samples: name, spec and fingerprint, but no `gather`.

    Args:
        data: a Dataset of samples or of global batches, or Python's global batches.
        name: its name in messages.

    Raises:
        DataError: it is empty, or gives something else.
    """

    finite = False
    heavy = True
    size = None
    """Nobody has counted."""

    def __init__(self, data: Any, name: str) -> None:
        self.data = data
        self.name = name
        self.batched = not isinstance(data, tf.data.Dataset) or _is_batched(data.element_spec)
        if isinstance(data, tf.data.Dataset):
            first = next(iter((data if self.batched else data.batch(1)).take(1).as_numpy_iterator()), None)
            if first is None:
                raise DataError(f"{name} holds no samples.")
            self._first = standard(first, name)
        else:
            self._first = opened(data)[0]
        self.spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), self._first
        )
        self.rows = len(tf.nest.flatten(self._first)[0])
        """Samples of the first batch."""

    def classes(self) -> int | None:
        """Return the number of classes where the first batch shows it: by one-hot targets."""
        targets = self._first[1]
        if tf.nest.is_nested(targets) or targets.ndim != 2 or targets.shape[1] < 2:
            return None
        one_hot = ((targets == 0) | (targets == 1)).all() and (targets.sum(axis=1) == 1).all()
        return int(targets.shape[1]) if one_hot else None

    def fingerprint(self) -> bytes:
        """Return a hash [32 bytes] of the first batch: no more is known."""
        return hashlib.sha256(content_of(tuple(map(np.asarray, tf.nest.flatten(self._first)))).encode()).digest()

    def describe(self, number: int) -> str:
        """Describe sample `number`."""
        return f"sample {number} of {self.name}"

    def batches(self, batch: int, option: str) -> Any:
        """Return the data in global batches of `batch` samples.

        Raises:
            ConfigError: Python's batches of another size.
        """
        if isinstance(self.data, tf.data.Dataset):
            if not self.batched:
                return self.data.batch(batch)
            return self.data if batch_size_of(self.data) == batch else self.data.rebatch(batch)
        if self.rows != batch:
            raise ConfigError(
                f"The batches of {self.name} are global batches, of {self.rows} samples. Received: {opt(option)} "
                f"{batch}. Use {opt(option, self.rows)}, or --cache memory to read them once into memory."
            )
        return self.data


def _is_batched(spec: Any) -> bool:
    """Whether elements are batches: a Dataset of samples shows by a scalar, or by different first dims."""
    shapes = [part.shape for part in tf.nest.flatten(spec)]
    if any(shape.rank == 0 for shape in shapes):
        return False
    return len({shape[0] for shape in shapes if shape.rank is not None}) <= 1
