"""From the samples of a source to each replica's batches: the global batch is formed first, then cut.

Which samples form a global batch is a function of (seed, epoch, step) alone, so the order does not
depend on the number of replicas, and any step can be reached without reading those before it. A replica
reads its own samples only.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import tensorflow as tf

from hvdtrain.config.data import Sharding, Tail
from hvdtrain.data.augment import Augmentation, Draws
from hvdtrain.data.bad_records import BadRecords, Exchange, with_weights
from hvdtrain.data.batch import Batch, as_batch, per_replica, slice_bounds, slice_bounds_of_tensor
from hvdtrain.data.file_order import FileOrder
from hvdtrain.data.order import Order
from hvdtrain.data.source import Source, settled

PREFETCH = 4
UNREADABLE = (tf.errors.OpError, UnicodeDecodeError)
"""What tf.data raises for a sample that cannot be read; the second where it quotes bytes that are no text."""

plain = tf.autograph.experimental.do_not_convert
"""Marks functions without data-dependent control flow: they trace faster, and their errors stay readable."""


class TrainingData(Protocol):
    """An endless stream of global batches, of which this replica takes its part."""

    steps_per_epoch: int
    batch: int
    """Samples of a full global batch."""
    remedy: str
    """What helps where steps wait for these batches, in a sentence."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Return this replica's batches from step `start_step` (from 0) on, without end."""


@dataclass(frozen=True)
class Reading:
    """How samples are read, apart from which."""

    augment: Augmentation | None = None
    finish: Callable[..., tuple[Any, ...]] | None = None
    """What is done to every batch last; see `DataSplits`."""
    tolerated: int = 0
    """Samples that may be bad."""
    threads: int = 0
    """Threads for reading and decoding; 0 lets TensorFlow decide."""
    memory_mb: int = 0
    """MiB for samples read ahead; 0 lets TensorFlow decide."""
    options: tf.data.Options = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        options = tf.data.Options()
        options.deterministic = True
        if self.threads:
            options.threading.private_threadpool_size = self.threads
        if self.memory_mb:
            options.autotune.ram_budget = self.memory_mb * 2**20
        object.__setattr__(self, "options", options)

    def batches(self, numbers: tf.data.Dataset, load: Callable[..., Any], *, heavy: bool) -> tf.data.Dataset:
        """Map `load` over the elements of `numbers`, in parallel where it is heavy, in their order."""
        parallel = (self.threads or tf.data.AUTOTUNE) if heavy else None
        return numbers.map(plain(load), num_parallel_calls=parallel).prefetch(PREFETCH).with_options(self.options)


class SourceTraining:
    """Batches of a source, in an order that the seed decides.

    Args:
        source: the samples.
        batch: samples of a global batch.
        index: this replica's place among `size`.
        size: number of replicas.
        seed: decides the order, together with the epoch.
        shuffle: False visits the samples in their own order.
        tail: see `DataConfig.tail`.
        shard_by: see `DataConfig.shard_by`.
        reading: augmentation, and how bad samples are dealt with.
        exchange: tells all ranks of bad samples, at every epoch's start.
        remedy: what helps where steps wait for the batches.

    Raises:
        ConfigError: the batch does not divide among the replicas.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        index: int,
        size: int,
        seed: int,
        shuffle: bool = True,
        tail: Tail = "pad",
        shard_by: Sharding = "samples",
        reading: Reading | None = None,
        exchange: Exchange | None = None,
        remedy: str = "What helps: a larger batch.",
    ) -> None:
        per_replica(batch, size)
        self.order: Order | FileOrder = (
            FileOrder(source, batch, seed, shuffle, tail)
            if shard_by == "files"
            else Order(source.size, batch, seed, shuffle, tail)
        )
        self.batch = batch
        self.steps_per_epoch = self.order.steps_per_epoch
        self.source = source
        self.remedy = remedy
        self.reading = reading or Reading()
        self.bad = BadRecords(source, self.reading.tolerated, exchange)
        self._index = index
        self._size = size

    def batches(self, start_step: int) -> Iterator[Batch]:
        """See `TrainingData.batches`.

        Raises:
            DataError: a sample cannot be read; it is named.
        """
        step = start_step
        while True:
            try:
                for batch in self._batches_from(step):
                    if step % self.steps_per_epoch == 0:
                        self.bad.share()
                    step += 1
                    yield batch
            except UNREADABLE as error:
                # What is left out from here on is another dataset: it starts again at this step.
                self.bad.examine(self._part_of(step), error)

    def _part_of(self, step: int) -> tf.Tensor:
        """Return the numbers of this replica's samples in the batch of `step`."""
        epoch, within = divmod(step, self.steps_per_epoch)
        samples = self.batch if within < self.order.full_batches else self.order.rest
        return self.order.part(epoch, within, 1, samples, self._index, self._size)[0]

    def _batches_from(self, start_step: int) -> Iterator[Batch]:
        """Return the batches of the samples that are not known to be bad.

        An epoch's last, short batch comes from a stream of its own: every stream has one static shape, and what is
        known about its batches is known when the step is compiled.
        """
        order = self.order
        epoch, within = divmod(start_step, self.steps_per_epoch)
        whole = self._stream(epoch, within, 0, order.full_batches, self.batch) if order.full_batches else iter(())
        rest = self._stream(epoch, 0, order.full_batches, 1, order.rest) if order.rest else iter(())
        for step in itertools.count(within):
            yield next(whole if step % self.steps_per_epoch < order.full_batches else rest)

    def _stream(self, epoch: int, skip: int, first: int, steps: int, samples: int) -> Iterator[Batch]:
        """Return this replica's batches of `samples` each: steps `first` … `first + steps - 1` of every epoch."""
        begin, end, has_samples = slice_bounds(samples, self._index, self._size)
        augment = self.reading.augment

        def numbers_of(epoch: tf.Tensor) -> tf.data.Dataset:
            # Formed for the whole epoch at once: what is left to do for a step is to gather its samples.
            mine = self.order.part(epoch, first, steps, samples, self._index, self._size)
            if augment is None:
                return tf.data.Dataset.from_tensor_slices((mine,))
            numbered = epoch * self.steps_per_epoch + first + tf.range(steps, dtype=tf.int64)
            return tf.data.Dataset.from_tensor_slices((mine, numbered))

        def load(numbers: tf.Tensor, step: tf.Tensor | None = None) -> tuple[Any, ...]:
            elements = self._gather(numbers)
            if augment is not None:
                elements = augment(elements, Draws(self.order.seed, step, samples, begin, end))
            return finished(elements, self.reading)

        epochs = tf.data.Dataset.range(epoch, tf.int64.max)
        numbers = epochs.flat_map(plain(numbers_of)).skip(skip)
        elements = self.reading.batches(numbers, load, heavy=self.source.heavy or augment is not None)
        return (as_batch(part, has_samples, samples, finite=self.source.finite or None) for part in elements)

    def _gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        return gathered(self.source, numbers, self.bad)


class SourceEvaluation:
    """This replica's part of every global batch of a source: each sample once, in order.

    Args:
        source: the samples.
        batch: samples of a global batch; need not divide.
        index: this replica's place among `size`.
        size: number of replicas.
        reading: how they are read; nothing is augmented.
        exchange: tells all ranks of bad samples, when the last batch was taken.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        index: int,
        size: int,
        reading: Reading | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.reading = reading or Reading()
        self.bad = BadRecords(source, self.reading.tolerated, exchange)
        self.steps = -(-source.size // batch)
        self._source = source
        self._batch = batch
        self._index = index
        self._size = size
        self._built: dict[int, tf.data.Dataset] = {}

    def __iter__(self) -> Iterator[Batch]:
        """Return the batches.

        Raises:
            DataError: a sample cannot be read; it is named.
        """
        step = 0
        while step < self.steps:
            try:
                for batch in self._dataset(step):
                    step += 1
                    yield batch
            except UNREADABLE as error:
                self.bad.examine(self._part_of(step)[0], error)
                self._built.clear()
        self.bad.share()

    def _dataset(self, first: int) -> tf.data.Dataset:
        """Return the batches from step `first` on; traced again only when more samples are left out."""
        if first not in self._built:
            self._built[first] = self._build(first)
        return self._built[first]

    def _build(self, first: int) -> tf.data.Dataset:
        def load(step: tf.Tensor) -> Batch:
            numbers, has_samples, total = self._part_of(step)
            elements = finished(gathered(self._source, numbers, self.bad), self.reading)
            return as_batch(elements, has_samples, tf.cast(total, tf.int32))

        steps = tf.data.Dataset.range(first, self.steps)
        return self.reading.batches(steps, load, heavy=self._source.heavy)

    def _part_of(self, step: Any) -> tuple[tf.Tensor, Any, Any]:
        """Return the numbers of this replica's samples, whether they count, and the samples of the global batch."""
        begin = tf.cast(step, tf.int64) * self._batch
        total = tf.minimum(begin + self._batch, self._source.size) - begin
        first, last, has_samples = slice_bounds_of_tensor(total, self._index, self._size)
        return tf.range(begin + first, begin + last), has_samples, total


def gathered(source: Source, numbers: tf.Tensor, bad: BadRecords) -> tuple[Any, ...]:
    """Return the samples `numbers`; where bad ones are tolerated, with weights that leave those out."""
    if not bad.tolerated:
        return settled(source, source.gather(numbers))
    usable, weights = bad.left_out(numbers)
    return with_weights(settled(source, source.gather(usable)), weights)


def finished(elements: tuple[Any, ...], reading: Reading) -> tuple[Any, ...]:
    """Do what is done to every batch last."""
    return elements if reading.finish is None else reading.finish(*elements)
