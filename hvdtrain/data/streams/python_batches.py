"""Streams of global batches from Python: a keras.utils.PyDataset, a generator function, or a generator object.

Every rank reads whole batches and takes its slice, so the batches must be the same on all ranks.
"""

import inspect
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError, NoSamplesError, opt
from hvdtrain.data.batch import Batch
from hvdtrain.data.order import Order
from hvdtrain.data.pipeline import steps_of_epoch
from hvdtrain.data.streams.cut import Cut, continued, standard
from hvdtrain.runtime.logs import warn_on_first

PREFETCH = 4
BatchFunction = Callable[[], Iterable[Any]]
Elements = tuple[Any, ...]
KEPT_MB = 256
"""MiB of batches that a rank keeps of a first pass, so that its samples need not be made twice."""
COUNTING_S = 20.0
"""Counting that takes longer is reported."""
T = TypeVar("T")


def is_stream(data: Any) -> bool:
    """Return whether `data` is a PyDataset or a generator function.

    Raises:
        ConfigError: a generator object, which can be read only once.
    """
    if inspect.isgenerator(data):
        raise ConfigError(
            "A generator can be read only once: pass the function that makes it, fit(batches) and not fit(batches())."
        )
    return isinstance(data, keras.utils.PyDataset) or inspect.isgeneratorfunction(data) or inspect.isfunction(data)


def opened(data: Any) -> tuple[Elements, Iterator[Any]]:
    """Return the first global batch of a stream, as arrays, and its batches from this one on.

    Raises:
        DataError: the stream is empty, or does not yield batches.
    """
    endless = isinstance(data, keras.utils.PyDataset) and data.num_batches is None
    batches = (_item(data, n) for n in itertools.count()) if endless else iter(each_once(data))
    for elements in batches:
        return standard(elements, name_of(data)), itertools.chain([elements], batches)
    raise NoSamplesError(
        f"{name_of(data)} {'holds' if isinstance(data, keras.utils.PyDataset) else 'gives'} no batches."
    )


def each_once(data: Any) -> Iterator[Any]:
    """Yield the batches of a finite stream, in its own order."""
    if isinstance(data, keras.utils.PyDataset):
        return (_item(data, number) for number in range(data.num_batches))
    return _call(data)


class PyDatasetTraining:
    """Training batches of a keras.utils.PyDataset.

    Batches are prefetched within an epoch by `workers` threads. As in Keras, `on_epoch_begin` is called before the
    first batch of an epoch is read, and `on_epoch_end` after its last step; training that starts at a later epoch does
    not call them for the earlier ones.

    Args:
        dataset: global batches `(inputs, targets[, sample_weight])`; each must be the same on all ranks.
        cut: takes this replica's slice.
        seed: seed of the order, combined with the epoch.
        shuffle: visit the batches in a new order every epoch; not for an infinite data set.
        steps_per_epoch: required if `num_batches` is None; else an epoch may be a part of a pass.

    Raises:
        ConfigError: steps_per_epoch is missing.
    """

    endless = (
        "leave it out, or let the PyDataset never end: num_batches = None, and batch number % N in __getitem__(number)"
    )
    remedy = "What helps: more workers=… of the PyDataset, and less work in its __getitem__."

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        cut: Cut,
        *,
        seed: int,
        shuffle: bool,
        steps_per_epoch: int | None = None,
    ) -> None:
        count = dataset.num_batches
        if count is None and steps_per_epoch is None:
            raise ConfigError(f"{cut.name} never ends (num_batches is None): pass {opt('steps_per_epoch', 'N')}.")
        self.batch = cut.batch
        self.pass_steps: int | None = count
        self.steps_per_epoch = int(steps_per_epoch or 0) if count is None else steps_of_epoch(steps_per_epoch, count)
        self._dataset = dataset
        self._cut = cut
        self._seed = seed
        self._shuffle = shuffle
        self.content = 0
        """Checksum of the global batches that were taken so far."""
        if cut.index == 0 and dataset.use_multiprocessing:
            warn_on_first(
                f"{cut.name} asks for use_multiprocessing: its batches are read by {max(1, dataset.workers)} "
                "threads instead, as a process that runs an exchange must not be forked.",
                stacklevel=2,
            )

    def batches(self, start_step: int) -> Iterator[Batch]:
        epoch, within = divmod(start_step, self.steps_per_epoch)
        while True:
            yield from self._epoch(epoch, within)
            epoch, within = epoch + 1, 0

    def sample(self) -> Batch:
        """Return the first batch, of which no epoch begins."""
        return self._cut(_item(self._dataset, int(self.numbers(0)[0])))

    def numbers(self, epoch: int) -> np.ndarray:
        """Return the batch numbers [steps_per_epoch] of `epoch`, in order."""
        numbers = np.arange(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)
        if self.pass_steps is None:
            return numbers
        order = Order(self.pass_steps, 1, self._seed, shuffle=self._shuffle)
        return order.numbers(numbers[0] // self.pass_steps, numbers % self.pass_steps).numpy()

    def _epoch(self, epoch: int, within: int) -> Iterator[Batch]:
        self._dataset.on_epoch_begin()
        left = self.steps_per_epoch - within
        try:
            for batch, checksum in _read_numbers(self._dataset, self.numbers(epoch)[within:], self._cut.noted):
                left -= 1
                self.content = continued(self.content, checksum)
                yield batch
        finally:
            # Also if training ends here: a later `fit` on the same data continues with the next epoch.
            if not left:
                self._dataset.on_epoch_end()


class GeneratorTraining:
    """Training batches of a generator function.

    The function is called again when its generator ends, which must be at the end of an epoch. Resuming skips the
    batches before, which the generator makes once more.

    Args:
        function: yields global batches `(inputs, targets[, sample_weight])`, the same on all ranks.
        cut: takes this replica's slice.
        steps_per_epoch: required for infinite generators; else counted by reading all batches once.
        opened: the batches of a first call; None: it has not been called.
    """

    remedy = "What helps: a keras.utils.PyDataset with workers=…, which makes several batches at a time."
    pass_steps: int | None = None

    def __init__(
        self,
        function: BatchFunction,
        cut: Cut,
        *,
        steps_per_epoch: int | None = None,
        opened: Iterator[Any] | None = None,
    ) -> None:
        self.batch = cut.batch
        self._function = function
        self._cut = cut
        elements = _call(function) if opened is None else opened
        if steps_per_epoch is not None:
            # Of a pass that is not counted, the first batch alone is kept: the model is built on it.
            elements = itertools.islice(elements, 1)
        self.first_pass = FirstPass(map(cut, elements), cut.name)
        """The pass that counted the batches; its batches are those of the first epoch."""
        self.steps_per_epoch = steps_per_epoch or self.first_pass.count
        self.first_epoch = 0
        """The training's epoch in which the function is called first."""
        self.content = 0
        """Checksum of the global batches that were taken so far, but for those of the first pass."""
        self.varies = self._counted = steps_per_epoch is None
        self._ahead: list[Future[Any]] = []

    def settle(self) -> None:
        """Wait until nothing is read ahead any more: a generator object may then be read by somebody else."""
        wait(self._ahead)

    def batches(self, start_step: int) -> Iterator[Batch]:
        start_step -= self.first_epoch * self.steps_per_epoch
        # If each call yields one epoch, earlier ones need not be read.
        skipped = start_step % self.steps_per_epoch if self._counted else start_step
        if skipped < self.first_pass.count and self.first_pass.kept:
            yield from self.first_pass.take(skipped)
            skipped = 0 if self._counted else 1
        yield from self._read(itertools.islice(self._elements(), skipped, None))

    def epochs(self, epoch: int, within: int) -> Iterator[Iterator[Batch]]:
        """Yield the batches of each epoch, from batch `within` of `epoch` on, each of a new call."""
        if epoch == self.first_epoch and self.first_pass.kept:
            yield self.first_pass.take(within)
            within = 0
        while True:
            yield self._read(itertools.islice(_call(self._function), within, None))
            within = 0

    def _read(self, elements: Iterator[Any]) -> Iterator[Batch]:
        """Yield this replica's slices of batches, which are read ahead."""
        tasks = itertools.repeat(lambda: next((self._cut.noted(each) for each in elements), None))
        for read in ahead(tasks, limit=PREFETCH, begun=self._ahead):
            if read is None:
                return
            batch, checksum = read
            self.content = continued(self.content, checksum)
            yield batch

    def _elements(self) -> Iterator[Any]:
        """Yield the batches of repeated calls.

        Raises:
            DataError: a generator ended within an epoch.
        """
        step = 0
        while True:
            begin = step
            for elements in _call(self._function):
                yield elements
                step += 1
            if step % self.steps_per_epoch or step == begin:
                raise DataError(
                    f"{self._cut.name} ended after {step - begin} batches, within an epoch of "
                    f"{self.steps_per_epoch} steps: pass another steps_per_epoch, or none to count them."
                )


class StreamEvaluation:
    """This replica's slice of every batch of a finite stream, in order; can be iterated repeatedly.

    As in Keras, `on_epoch_begin` and `on_epoch_end` of a PyDataset are called around each pass.

    Raises:
        ConfigError: it never ends.
    """

    def __init__(self, data: Any, *, index: int, size: int) -> None:
        if isinstance(data, keras.utils.PyDataset) and data.num_batches is None:
            raise ConfigError(f"{name_of(data)} never ends (num_batches is None): pass {opt('validation_steps', 'N')}.")
        self._data = data
        self._cut = Cut(0, index=index, size=size, name=name_of(data))

    def __iter__(self) -> Iterator[Batch]:
        if not isinstance(self._data, keras.utils.PyDataset):
            yield from map(self._cut, _call(self._data))
            return
        self._data.on_epoch_begin()
        try:
            yield from _read_numbers(self._data, np.arange(self._data.num_batches), self._cut)
        finally:
            self._data.on_epoch_end()


def _read_numbers(dataset: keras.utils.PyDataset, numbers: np.ndarray, cut: Callable[[Any], T]) -> Iterator[T]:
    workers = max(1, dataset.workers)
    limit = dataset.max_queue_size if workers > 1 else PREFETCH
    # Prefetch this replica's slice, not the whole batch.
    tasks = (partial(lambda number: cut(_item(dataset, number)), int(number)) for number in numbers)
    return ahead(tasks, workers=workers, limit=limit)


def _item(dataset: keras.utils.PyDataset, number: int) -> Any:
    """Return a batch of a PyDataset; inputs alone become `(inputs,)`, as in Keras."""
    batch = dataset[number]
    return batch if isinstance(batch, tuple | list) else (batch,)


def _call(function: BatchFunction) -> Iterator[Any]:
    returned = function()
    if not hasattr(returned, "__iter__") or isinstance(returned, tuple | dict):
        raise DataError(
            f"{name_of(function)} must be a generator function of global batches. "
            f"It returned: {type(returned).__name__}."
        )
    return iter(returned)


def name_of(data: Any) -> str:
    """Return the name of a stream in messages."""
    if isinstance(data, tf.data.Dataset):
        return "The dataset"
    return type(data).__name__ if isinstance(data, keras.utils.PyDataset) else getattr(data, "__name__", repr(data))


def as_function(data: Any, steps_per_epoch: int | None, *, passes: int = 1) -> Any:
    """Wrap a generator object as a function that continues it; return other data unchanged.

    The first batch, which is inspected before training, is yielded again.

    Raises:
        ConfigError: a generator object without `steps_per_epoch` for several passes.
    """
    if not inspect.isgenerator(data):
        return data
    if steps_per_epoch is None and passes > 1:
        raise ConfigError(
            f"A generator can be read only once: pass steps_per_epoch=N, or the function that makes it, "
            f"fit({data.__name__}) and not fit({data.__name__}())."
        )
    first: list[Any] = []
    ended = False

    def batches() -> Iterator[Any]:
        nonlocal ended
        if ended:
            advice = "" if steps_per_epoch else ", or more than are kept while they are counted: pass steps_per_epoch=N"
            raise DataError(f"{batches.__name__} ended before the training did: it has too few batches{advice}.")
        yield from first
        for batch in data:
            if not first:
                first.append(batch)
            yield batch
        ended = True

    batches.__name__ = data.__name__
    return batches


class FirstPass:
    """The batches of a pass: their number, and the batches themselves while there is memory for them.

    Args:
        batches: this replica's slices, read to their end.
        name: the name of the data in messages.
    """

    def __init__(self, batches: Iterable[Batch], name: str) -> None:
        self.count = 0
        """Number of batches."""
        self._kept: list[Batch] = []
        self.kept = True
        """Whether the batches are still kept."""
        begin, size, warned = time.monotonic(), 0, False
        for batch in batches:
            self.count += 1
            size += _bytes(batch)
            if size > KEPT_MB * 2**20:
                self.drop()
            if self.kept:
                self._kept.append(batch)
            if not warned and time.monotonic() - begin > COUNTING_S:
                warned = True
                warn_on_first(
                    f"{name} is being read to count its batches, {self.count} so far: pass steps_per_epoch, which it "
                    "needs if it does not end.",
                    stacklevel=2,
                )

    def drop(self) -> None:
        """Release the batches."""
        self.kept, self._kept = False, []

    def take(self, start: int) -> Iterator[Batch]:
        """Yield the kept batches from number `start` on, then release them."""
        yield from self._kept[start:]
        self.drop()


def _bytes(batch: Batch) -> int:
    tensors = [part for part in tf.nest.flatten(tuple(batch), expand_composites=True) if tf.is_tensor(part)]
    return sum(
        int(tf.reduce_sum(tf.strings.length(tensor)))
        if tensor.dtype == tf.string
        else tensor.shape.num_elements() * tensor.dtype.size
        for tensor in tensors
    )


def ahead(
    tasks: Iterable[Callable[[], T]], *, workers: int = 1, limit: int = 4, begun: list[Future[T]] | None = None
) -> Iterator[T]:
    """Call `tasks` in threads and yield their results in order.

    How far ahead it runs depends on how many results were taken, never on timing: with one worker, tasks that draw
    from a shared generator draw the same on every rank. The first task runs alone, since a caller that inspects one
    result may want no more.

    Args:
        tasks: functions to call; with one worker, one at a time.
        workers: number of threads.
        limit: results held at most.
        begun: is given the latest calls, which may go on after the last result was taken.
    """
    remaining = iter(tasks)
    for first in remaining:
        yield first()
        break
    waiting: deque[Future[T]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="data")
    try:
        for task in remaining:
            waiting.append(pool.submit(task))
            if begun is not None:
                begun[:] = waiting
            if len(waiting) > limit:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Python's garbage collector may close this on any thread, the watchdog's too, and a task may take for ever.
        # What was begun is finished, so that ranks have drawn the same.
        pool.shutdown(wait=False)
