"""Training and evaluation on a user's tf.data.Dataset of global batches."""

from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.batch import Batch, per_replica, slice_batch
from hvdtrain.data.pipeline import PREFETCH, no_autograph


class DatasetTraining:
    """Training on a user's tf.data.Dataset of global batches, of which each replica takes its slice.

    Every rank reads the whole dataset, so its order must be the same on all of them: give `shuffle` a seed, or
    call `hvdtrain.init()` before the dataset is made.

    Args:
        dataset: elements `(inputs, targets[, sample_weight])` with a batch dim, finite or repeated.
        batch: samples of a full global batch.
        index: this replica's index among `size`.
        size: number of replicas.
        steps_per_epoch: required if the dataset is infinite; counted if None.
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
        return map(self._with_static_values, stream.map(no_autograph(self._cut)).prefetch(PREFETCH))

    def _cut(self, *elements: Any) -> Batch:
        return slice_batch(elements, self._index, self._size)

    def _with_static_values(self, batch: Batch) -> Batch:
        """Replace tensors by Python values that hold for all full batches, if their shapes are static."""
        if not self._one_shape or int(batch.global_samples) != self.batch:
            return batch
        return batch._replace(has_samples=1.0, global_samples=self.batch)


def count_batches(dataset: tf.data.Dataset) -> int:
    """Return the number of elements of `dataset`, reading it if its cardinality is unknown.

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
    """Return this replica's slice of every batch of a user's finite dataset."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ConfigError("The validation dataset never ends: use take().")
    cut = dataset.map(no_autograph(lambda *elements: slice_batch(elements, index, size)))
    return cut.prefetch(PREFETCH)
