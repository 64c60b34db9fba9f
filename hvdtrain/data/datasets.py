"""A user's tf.data.Dataset of global batches, each cut into the replicas' parts."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.batch import Batch, per_replica, slice_batch
from hvdtrain.data.pipeline import PREFETCH, plain


class DatasetTraining:
    """A user's tf.data.Dataset of global batches, each cut into the replicas' parts.

    Every rank reads the whole dataset, so its order must be the same on all of them: give `shuffle` a seed, or
    call `hvdtrain.init()` before the dataset is made.

    Args:
        dataset: elements `(inputs, targets[, sample_weight])` with a batch dim, finite or repeated.
        batch: samples of a full global batch.
        index: this replica's place among `size`.
        size: number of replicas.
        steps_per_epoch: needed where the dataset does not end; counted if None.
    """

    remedy = (
        "What helps: map() with num_parallel_calls=tf.data.AUTOTUNE and with TensorFlow's own operations, and cache() "
        "where the decoded samples fit."
    )

    def __init__(
        self, dataset: tf.data.Dataset, *, batch: int, index: int, size: int, steps_per_epoch: int | None = None
    ) -> None:
        per_replica(batch, size)
        self.batch = batch
        self.steps_per_epoch = steps_per_epoch or count_batches(dataset)
        self._dataset = dataset
        self._one_shape = all(spec.shape[1:].is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec))
        self._index = index
        self._size = size

    def batches(self, start_step: int) -> Iterator[Batch]:
        """See `TrainingData.batches`."""
        stream = self._dataset.repeat().skip(start_step)
        return map(self._settled, stream.map(plain(self._cut)).prefetch(PREFETCH))

    def _cut(self, *elements: Any) -> Batch:
        return slice_batch(elements, self._index, self._size)

    def _settled(self, batch: Batch) -> Batch:
        """Say in Python values what all full batches have in common, if their shapes are the same."""
        if not self._one_shape or int(batch.global_samples) != self.batch:
            return batch
        return batch._replace(has_samples=1.0, global_samples=self.batch)


def count_batches(dataset: tf.data.Dataset) -> int:
    """Return the number of elements of `dataset`, by reading it where it does not know.

    Raises:
        ConfigError: it never ends.
        DataError: it is empty.
    """
    count = int(dataset.cardinality())
    if count == tf.data.INFINITE_CARDINALITY:
        raise ConfigError("The dataset never ends: pass steps_per_epoch.")
    if count == tf.data.UNKNOWN_CARDINALITY:
        count = int(dataset.reduce(tf.constant(0, tf.int64), lambda total, *_: total + 1))
    if count == 0:
        raise DataError("The dataset is empty.")
    return count


def evaluation_of_dataset(dataset: tf.data.Dataset, *, index: int, size: int) -> tf.data.Dataset:
    """Return this replica's part of every batch of a user's finite dataset."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ConfigError("The validation dataset never ends: use take().")
    cut = dataset.map(plain(lambda *elements: slice_batch(elements, index, size)))
    return cut.prefetch(PREFETCH)
