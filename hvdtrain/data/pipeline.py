"""The data pipeline: from the samples of a source to each replica's slices of global batches.

Global batches are formed first, as a function of (seed, epoch, step) alone, then sliced: the order of samples does not
depend on the number of replicas, and any step is reached without reading those before it. A replica reads only its own
samples.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import tensorflow as tf

from hvdtrain.config.data import Sharding, Tail
from hvdtrain.config.errors import ConfigError, DataError, opt
from hvdtrain.data.augment import Augmentation, Draws
from hvdtrain.data.bad_records import BadRecords, Gather, with_weights
from hvdtrain.data.batch import Batch, as_batch, packed, per_replica, slice_batch, slice_bounds, slice_bounds_of_tensor
from hvdtrain.data.file_order import FileOrder
from hvdtrain.data.order import Order
from hvdtrain.data.source import Source, with_static_shapes
from hvdtrain.runtime.logs import warn_on_first

PREFETCH = 4
UNREADABLE = (tf.errors.OpError, UnicodeDecodeError)
"""Errors of tf.data for an unreadable sample; the second if its message quotes bytes that are not UTF-8."""

no_autograph = tf.autograph.experimental.do_not_convert
"""For functions without data-dependent control flow: they trace faster, and their errors stay readable."""


def sliced(dataset: tf.data.Dataset, index: int, size: int) -> tf.data.Dataset:
    """Return a replica's slice of every batch of `dataset`, whatever the form of its elements."""
    is_tuple = isinstance(dataset.element_spec, tuple)

    def cut(*elements: Any) -> Batch:  # map() unpacks tuples, and nothing else
        return slice_batch(elements if is_tuple else elements[0], index, size)

    return dataset.map(no_autograph(cut))


class TrainingData(Protocol):
    """An endless stream of this replica's slices of global batches."""

    steps_per_epoch: int
    pass_steps: int | None
    """Steps of a pass over the samples; None if unknown, infinite or not to be compared with an epoch's."""
    batch: int
    """Samples of a full global batch."""
    remedy: str
    """Advice shown if steps wait for data: a sentence."""

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yield this replica's slices from step `start_step` (counted from 0) on, endlessly."""


class VaryingData(TrainingData, Protocol):
    """Data whose passes may differ in length, each of which is an epoch, as in Keras."""

    varies: bool
    """Whether they may; else an epoch has `steps_per_epoch`."""

    def epochs(self, epoch: int, within: int) -> Iterator[Iterator[Batch]]:
        """Yield the batches of each epoch, from batch `within` of `epoch` on. A pass begins with its first batch."""


def passes_of(data: VaryingData, epoch: int, within: int) -> Iterator[tuple[Batch, bool]]:
    """Yield the batches from batch `within` of `epoch` on, and whether each is the last of its pass.

    Raises DataError for an epoch without batches.
    """
    for number, batches in enumerate(data.epochs(epoch, within), epoch + 1):
        last: Batch | None = None
        for batch in batches:
            if last is not None:
                yield last, False
            last = batch
        if last is None:
            raise DataError(f"The data gave no batches in epoch {number}.")
        yield last, True


def check_passes(data: TrainingData, total_steps: int) -> None:
    """Verify that no pass over the samples ends within an epoch. Raises ConfigError naming both lengths."""
    steps, whole = data.steps_per_epoch, data.pass_steps
    if whole is not None and whole % steps and total_steps > whole:
        endless = getattr(data, "endless", "leave it out")
        raise ConfigError(
            f"A pass over the data has {whole} steps, which {opt('steps_per_epoch', steps)} does not divide: Keras "
            f"would interrupt an epoch where the data run out. Use a divisor, or {endless}."
        )


def steps_of_epoch(given: int | None, whole: int) -> int:
    """Return the steps of an epoch: those `given`, but at most those of a `whole` pass, as in Keras."""
    if given is not None and given > whole:
        warn_on_first(
            f"steps_per_epoch={given}: the data run out after {whole} steps, and each epoch ends there, as in Keras.",
            stacklevel=3,
        )
    return min(given or whole, whole)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """Options of reading and transforming samples, independent of their order."""

    augment: Augmentation | None = None
    finish: Callable[..., tuple[Any, ...]] | None = None
    """Last transformation of every batch; see `DataSplits.finish`."""
    tolerated: int = 0
    """Bad samples to tolerate."""
    threads: int = 0
    """Threads for reading and decoding; 0 lets TensorFlow decide."""
    memory_mb: int = 0
    """MiB for prefetched samples; 0 lets TensorFlow decide."""

    def batches(self, numbers: tf.data.Dataset, load: Callable[..., Any], *, heavy: bool) -> tf.data.Dataset:
        """Map `load` over `numbers`, in order; in parallel if it is heavy."""
        options = tf.data.Options()
        options.deterministic = True
        if self.threads:
            options.threading.private_threadpool_size = self.threads
        if self.memory_mb:
            options.autotune.ram_budget = self.memory_mb * 2**20
        parallel = (self.threads or tf.data.AUTOTUNE) if heavy else None
        return numbers.map(no_autograph(load), num_parallel_calls=parallel).prefetch(PREFETCH).with_options(options)

    def finished(self, elements: tuple[Any, ...]) -> tuple[Any, ...]:
        """Apply the last transformation of every batch."""
        return elements if self.finish is None else self.finish(*elements)


class SourceTraining:
    """Training batches of a source.

    Args:
        source: the samples.
        batch: samples of a global batch.
        index: this replica's index among `size`.
        size: number of replicas.
        seed: seed of the order, combined with the epoch.
        shuffle: False visits the samples in the order of their numbers.
        tail: see `DataConfig.tail`.
        shard_by: see `DataConfig.shard_by`.
        read_options: augmentation, tolerance of bad samples, threads.
        gather: returns every rank's bytes to all, to share bad samples at the start of each epoch.
        remedy: advice shown if steps wait for data.
        uneven: whether a batch need not divide among the replicas.
        steps_per_epoch: steps after which an epoch ends within a pass over the samples; default: a whole pass.

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
        read_options: ReadOptions | None = None,
        gather: Gather | None = None,
        remedy: str = "What helps: a larger batch.",
        uneven: bool = False,
        steps_per_epoch: int | None = None,
    ) -> None:
        per_replica(batch, size, uneven=uneven)
        self.order = (
            FileOrder(source=source, batch=batch, seed=seed, shuffle=shuffle, tail=tail)
            if shard_by == "files"
            else Order(samples=source.size, batch=batch, seed=seed, shuffle=shuffle, tail=tail)
        )
        self.batch = batch
        self.pass_steps: int | None = self.order.steps_per_epoch
        self.steps_per_epoch = steps_of_epoch(steps_per_epoch, self.order.steps_per_epoch)
        self.source = source
        self.remedy = remedy
        self.read_options = read_options or ReadOptions()
        self.bad = BadRecords(source, self.read_options.tolerated, gather)
        self._index = index
        self._size = size

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yield this replica's slices from step `start_step` on, endlessly.

        Raises:
            DataError: a sample cannot be read; names it.
        """
        step = start_step
        while True:
            try:
                for batch in self._batches_from(step):
                    if step % self.order.steps_per_epoch == 0:
                        self.bad.share()
                    step += 1
                    yield batch
            except UNREADABLE as error:
                # Skipping a sample needs another dataset, which starts at this step.
                self.bad.examine(self._part_of(step), error)

    def sample(self) -> Batch:
        """Return the first batch, unless bad samples may have to be found, without building a pipeline."""
        if self.read_options.tolerated or self.read_options.augment is not None:
            return next(self.batches(0))
        samples = self.batch if self.order.full_batches else self.order.rest
        *_, has_samples = slice_bounds(samples, self._index, self._size)
        try:
            elements = self.read_options.finished(gather_readable(self.source, self._part_of(0), self.bad))
        except UNREADABLE:
            return next(self.batches(0))  # which names the sample
        return self._batch_of(elements, has_samples, samples)

    def slice_at(self, step: int, index: int, size: int) -> Batch:
        """Return slice `index` of `size` of the batch of `step`."""
        epoch, within = divmod(step, self.order.steps_per_epoch)
        samples = self.batch if within < self.order.full_batches else self.order.rest
        begin, end, has_samples = slice_bounds(samples, index, size)
        numbers = self.order.slice_numbers(epoch, within, 1, samples, index, size)[0]
        elements = with_static_shapes(self.source, self.source.gather(numbers))
        if self.read_options.augment is not None:
            draws = Draws(seed=self.order.seed, step=tf.constant(step, tf.int64), samples=samples, begin=begin, end=end)
            elements = self.read_options.augment(elements, draws)
        return self._batch_of(self.read_options.finished(elements), has_samples, samples)

    def _batch_of(self, elements: Any, has_samples: float, samples: int) -> Batch:
        return as_batch(packed(elements), has_samples, samples, finite=self.source.finite or None)

    def _part_of(self, step: int) -> tf.Tensor:
        """Return the numbers of this replica's samples in the batch of `step`."""
        epoch, within = divmod(step, self.order.steps_per_epoch)
        samples = self.batch if within < self.order.full_batches else self.order.rest
        return self.order.slice_numbers(epoch, within, 1, samples, self._index, self._size)[0]

    def _batches_from(self, start_step: int) -> Iterator[Batch]:
        """Yield the batches from `start_step` on, without the samples known to be bad.

        An epoch's last, short batch comes from a stream of its own: each stream then has one static shape, and the
        step is compiled for it.
        """
        order = self.order
        epoch, within = divmod(start_step, self.order.steps_per_epoch)
        # Nothing is built before the first batch is asked for.
        whole = self._stream(epoch, skip=within, first=0, steps=order.full_batches, samples=self.batch)
        rest = self._stream(epoch, skip=0, first=order.full_batches, steps=1, samples=order.rest)
        for step in itertools.count(within):
            yield next(whole if step % self.order.steps_per_epoch < order.full_batches else rest)

    def _stream(self, epoch: int, skip: int, first: int, steps: int, samples: int) -> Iterator[Batch]:
        """Yield this replica's slices of batches `first` … `first + steps - 1`, of `samples` each, of every epoch.

        The pipeline is built with the first slice that is asked for.
        """
        begin, end, has_samples = slice_bounds(samples, self._index, self._size)
        augment = self.read_options.augment

        def numbers_of(epoch: tf.Tensor) -> tf.data.Dataset:
            # Computed for the whole epoch at once, so that a step only gathers its samples.
            mine = self.order.slice_numbers(epoch, first, steps, samples, self._index, self._size)
            if augment is None:
                return tf.data.Dataset.from_tensor_slices((mine,))
            numbered = epoch * self.order.steps_per_epoch + first + tf.range(steps, dtype=tf.int64)
            return tf.data.Dataset.from_tensor_slices((mine, numbered))

        def load(numbers: tf.Tensor, step: tf.Tensor | None = None) -> tuple[Any, ...]:
            elements = gather_readable(self.source, numbers, self.bad)
            if augment is not None:
                elements = augment(
                    elements, Draws(seed=self.order.seed, step=step, samples=samples, begin=begin, end=end)
                )
            return self.read_options.finished(elements)

        epochs = tf.data.Dataset.range(epoch, tf.int64.max)
        numbers = epochs.flat_map(no_autograph(numbers_of)).skip(skip)
        elements = self.read_options.batches(numbers, load, heavy=self.source.heavy or augment is not None)
        for part in elements:
            yield self._batch_of(part, has_samples, samples)


class SourceEvaluation:
    """Evaluation batches of a source: this replica's slice of each, every sample once, in order.

    Args:
        source: the samples.
        batch: samples of a global batch; need not divide.
        index: this replica's index among `size`.
        size: number of replicas.
        read_options: tolerance of bad samples, threads; nothing is augmented.
        gather: returns every rank's bytes to all, to share bad samples after the last batch.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch: int,
        index: int,
        size: int,
        read_options: ReadOptions | None = None,
        gather: Gather | None = None,
    ) -> None:
        self.read_options = read_options or ReadOptions()
        self.bad = BadRecords(source, self.read_options.tolerated, gather)
        self.steps = -(-source.size // batch)
        self._source = source
        self._batch = batch
        self._index = index
        self._size = size
        self._built: dict[int, tf.data.Dataset] = {}

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches.

        Raises:
            DataError: a sample cannot be read; names it.
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
        """Return the batches from step `first` on; rebuilt only when more samples turn out bad."""

        def load(step: tf.Tensor) -> Batch:
            numbers, has_samples, total = self._part_of(step)
            elements = self.read_options.finished(gather_readable(self._source, numbers, self.bad))
            return as_batch(packed(elements), has_samples, tf.cast(total, tf.int32))

        if first not in self._built:
            steps = tf.data.Dataset.range(first, self.steps)
            self._built[first] = self.read_options.batches(steps, load, heavy=self._source.heavy)
        return self._built[first]

    def _part_of(self, step: Any) -> tuple[tf.Tensor, Any, Any]:
        """Return the numbers of this replica's samples, whether they count, and the global number of samples."""
        begin = tf.cast(step, tf.int64) * self._batch
        total = tf.minimum(begin + self._batch, self._source.size) - begin
        first, last, has_samples = slice_bounds_of_tensor(total, self._index, self._size)
        return tf.range(begin + first, begin + last), has_samples, total


def gather_readable(source: Source, numbers: tf.Tensor, bad: BadRecords) -> tuple[Any, ...]:
    """Return the samples `numbers`; where bad ones are tolerated, with weights that are 0 for them."""
    if not bad.tolerated:
        return with_static_shapes(source, source.gather(numbers))
    usable, weights = bad.left_out(numbers)
    return with_weights(with_static_shapes(source, source.gather(usable)), weights)
