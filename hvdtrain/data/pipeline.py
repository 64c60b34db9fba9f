"""From samples to each replica's batches: the global batch is formed first, then cut.

Which samples form a global batch is a function of (seed, epoch, step) alone, so the order does not
depend on the number of replicas, and any step can be reached without reading those before it.
"""

import itertools
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.batch import Batch, as_batch, per_replica, slice_batch, slice_bounds

PREFETCH = 4

_plain = tf.autograph.experimental.do_not_convert
"""Marks functions without data-dependent control flow: they trace faster, and their errors stay readable."""


class TrainingData(Protocol):
    """An endless stream of global batches, of which this replica takes its part."""

    steps_per_epoch: int
    batch: int
    """Samples of a full global batch."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Return this replica's batches from step `start_step` (from 0) on, without end."""


class ArrayTraining:
    """Batches of arrays in memory, in an order that the seed decides.

    Args:
        source: the samples.
        batch: samples of a global batch.
        index: this replica's place among `size`.
        size: number of replicas.
        seed: decides the order, together with the epoch.
        shuffle: False visits the samples in their own order.

    Raises:
        ConfigError: the batch does not divide among the replicas.
    """

    def __init__(
        self, source: ArraySource, *, batch: int, index: int, size: int, seed: int, shuffle: bool = True
    ) -> None:
        per_replica(batch, size)
        self.batch = batch
        self.steps_per_epoch = -(-source.size // batch)
        self.source = source
        self._index = index
        self._size = size
        self._seed = seed
        self._shuffle = shuffle

    def batches(self, start_step: int) -> Iterator[Batch]:
        """See `TrainingData.batches`.

        An epoch's last, short batch comes from a stream of its own: every stream has one static shape, and what is
        known about its batches is known when the step is compiled.
        """
        full, tail = divmod(self.source.size, self.batch)
        epoch, within = divmod(start_step, self.steps_per_epoch)
        whole = self._stream(epoch, within, 0, full, self.batch) if full else iter(())
        rest = self._stream(epoch, 0, full, 1, tail) if tail else iter(())
        for step in itertools.count(within):
            yield next(whole if step % self.steps_per_epoch < full else rest)

    def _stream(self, epoch: int, skip: int, first: int, steps: int, samples: int) -> Iterator[Batch]:
        """Return this replica's batches of `samples` each: steps `first` … `first + steps - 1` of every epoch."""
        begin, end, present = slice_bounds(samples, self._index, self._size)
        span = slice(first * self.batch, first * self.batch + steps * samples)

        def numbers_of(epoch: tf.Tensor) -> tf.data.Dataset:
            # Formed for the whole epoch at once: what is left to do for a step is to gather its samples.
            mine = tf.reshape(self._order(epoch)[span], [steps, samples])[:, begin:end]
            return tf.data.Dataset.from_tensor_slices(mine)

        epochs = tf.data.Dataset.range(epoch, tf.int64.max)
        elements = epochs.flat_map(_plain(numbers_of)).skip(skip).map(_plain(self.source.gather)).prefetch(PREFETCH)
        return (as_batch(part, present, samples, finite=self.source.finite or None) for part in elements)

    def _order(self, epoch: tf.Tensor) -> tf.Tensor:
        """Return the sample numbers [samples] in the order of `epoch`."""
        places = tf.range(tf.constant(self.source.size, tf.int64))
        if not self._shuffle:
            return places
        key = tf.stack([tf.constant(self._seed, tf.int64), epoch])
        return tf.random.experimental.index_shuffle(places, key, self.source.size - 1)


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
        return map(self._settled, stream.map(_plain(self._cut)).prefetch(PREFETCH))

    def _cut(self, *elements: Any) -> Batch:
        return slice_batch(elements, self._index, self._size)

    def _settled(self, batch: Batch) -> Batch:
        """Say in Python values what all full batches have in common, if their shapes are the same."""
        if not self._one_shape or int(batch.global_samples) != self.batch:
            return batch
        return batch._replace(present=1.0, global_samples=self.batch)


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


def evaluation_batches(source: ArraySource, *, batch: int, index: int, size: int) -> tf.data.Dataset:
    """Return this replica's part of every global batch of `source`, each sample once, in order."""
    steps = -(-source.size // batch)

    def batch_of(step: tf.Tensor) -> Batch:
        begin = step * batch
        places = tf.range(begin, tf.minimum(begin + batch, source.size))
        return slice_batch(source.gather(places), index, size)

    return tf.data.Dataset.range(steps).map(_plain(batch_of)).prefetch(PREFETCH)


def evaluation_of_dataset(dataset: tf.data.Dataset, *, index: int, size: int) -> tf.data.Dataset:
    """Return this replica's part of every batch of a user's finite dataset."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ConfigError("The validation dataset never ends: use take().")
    cut = dataset.map(_plain(lambda *elements: slice_batch(elements, index, size)))
    return cut.prefetch(PREFETCH)
