"""Streams of global batches from Python: a keras.utils.PyDataset, or a generator function.

Every rank reads whole batches and takes its slice, so the batches must be the same on all ranks.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import keras
import numpy as np

from hvdtrain.config.errors import ConfigError, DataError, NoSamplesError, opt
from hvdtrain.data.batch import Batch, per_replica
from hvdtrain.data.order import Order
from hvdtrain.data.streams.ahead import ahead
from hvdtrain.data.streams.first_pass import FirstPass
from hvdtrain.data.streams.global_batches import Cut, Elements, standard
from hvdtrain.runtime.warning import warn_on_first

PREFETCH = 4
BatchFunction = Callable[[], Iterable[Any]]


def is_stream(data: Any) -> bool:
    """Whether `data` is a PyDataset or a generator function.

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
    batches = iter(each_once(data)) if not _is_endless(data) else (_item(data, n) for n in itertools.count())
    for elements in batches:
        return standard(elements, _name(data)), itertools.chain([elements], batches)
    raise NoSamplesError(f"{_name(data)} {'holds' if isinstance(data, keras.utils.PyDataset) else 'gives'} no batches.")


def _is_endless(data: Any) -> bool:
    return isinstance(data, keras.utils.PyDataset) and data.num_batches is None


def mapped(data: Any, change: Callable[..., Elements]) -> Any:
    """Return a stream like `data` with `change(inputs, targets[, sample_weight])` applied to every batch."""
    if isinstance(data, keras.utils.PyDataset):
        return _Mapped(data, change)
    return lambda: (change(*standard(elements, _name(data))) for elements in _call(data))


def each_once(data: Any) -> Iterator[Any]:
    """Yield the batches of a finite stream, in its own order."""
    if isinstance(data, keras.utils.PyDataset):
        return (_item(data, number) for number in range(data.num_batches))
    return _call(data)


class PyDatasetTraining:
    """Training batches of a keras.utils.PyDataset; see `TrainingData`.

    Batches are prefetched within an epoch by `workers` threads. As in Keras, `on_epoch_begin` is called before the
    first batch of an epoch is read, and `on_epoch_end` after its last step; training that starts at a later epoch does
    not call them for the earlier ones.

    Args:
        dataset: global batches `(inputs, targets[, sample_weight])`; each must be the same on all ranks.
        batch: samples of a full global batch.
        index: this replica's index among `size`.
        size: number of replicas.
        seed: seed of the order, combined with the epoch.
        shuffle: visit the batches in a new order every epoch; not for an infinite data set.
        steps_per_epoch: required if `num_batches` is None.

    Raises:
        ConfigError: the batch does not divide among the replicas; steps_per_epoch is missing, or superfluous.
    """

    remedy = "What helps: more workers=… of the PyDataset, and less work in its __getitem__."

    def __init__(
        self,
        dataset: keras.utils.PyDataset,
        *,
        batch: int,
        index: int,
        size: int,
        seed: int,
        shuffle: bool,
        steps_per_epoch: int | None = None,
        uneven: bool = False,
    ) -> None:
        per_replica(batch, size, uneven=uneven)
        count = dataset.num_batches
        if count is None and steps_per_epoch is None:
            raise ConfigError(f"{_name(dataset)} never ends (num_batches is None): pass {opt('steps_per_epoch', 'N')}.")
        if count is not None and steps_per_epoch is not None:
            raise ConfigError(f"steps_per_epoch is for data that do not end; {_name(dataset)} has {count} batches.")
        self.batch = batch
        self.steps_per_epoch = int(count or steps_per_epoch or 0)
        self._dataset = dataset
        self._endless = count is None
        self._cut = Cut(batch, index, size, _name(dataset))
        self._seed = seed
        self._shuffle = shuffle
        if index == 0:
            _warn_of_processes(dataset)

    def batches(self, start_step: int) -> Iterator[Batch]:
        """See `TrainingData.batches`."""
        epoch, within = divmod(start_step, self.steps_per_epoch)
        while True:
            yield from self._epoch(epoch, within)
            epoch, within = epoch + 1, 0

    def numbers(self, epoch: int) -> np.ndarray:
        """Return the batch numbers [steps_per_epoch] of `epoch`, in order."""
        if self._endless:
            return np.arange(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch)
        if not self._shuffle:
            return np.arange(self.steps_per_epoch)
        order = Order(self.steps_per_epoch, 1, self._seed)
        return order.numbers(epoch, np.arange(self.steps_per_epoch)).numpy()

    def _epoch(self, epoch: int, within: int) -> Iterator[Batch]:
        self._dataset.on_epoch_begin()
        left = self.steps_per_epoch - within
        try:
            for batch in _read_numbers(self._dataset, self.numbers(epoch)[within:], self._cut):
                left -= 1
                yield batch
        finally:
            # Also if training ends here: a later `fit` on the same data continues with the next epoch.
            if not left:
                self._dataset.on_epoch_end()


class GeneratorTraining:
    """Training batches of a generator function; see `TrainingData`.

    The function is called again when its generator ends, which must be at the end of an epoch. Resuming skips the
    batches before, which the generator makes once more.

    Args:
        function: yields global batches `(inputs, targets[, sample_weight])`, the same on all ranks.
        batch: samples of a full global batch.
        index: this replica's index among `size`.
        size: number of replicas.
        steps_per_epoch: required for infinite generators; else counted by reading all batches once.
        opened: the batches of a first call; None: it has not been called.
        uneven: whether a batch need not divide among the replicas.

    Raises:
        ConfigError: the batch does not divide among the replicas.
        DataError: no batches.
    """

    remedy = "What helps: a keras.utils.PyDataset with workers=…, which makes several batches at a time."

    def __init__(
        self,
        function: BatchFunction,
        *,
        batch: int,
        index: int,
        size: int,
        steps_per_epoch: int | None = None,
        opened: Iterator[Any] | None = None,
        uneven: bool = False,
    ) -> None:
        per_replica(batch, size, uneven=uneven)
        self.batch = batch
        self._function = function
        self._cut = Cut(batch, index, size, _name(function))
        elements = _call(function) if opened is None else opened
        if steps_per_epoch is not None:
            # Of a pass that is not counted, the first batch alone is kept: the model is built on it.
            elements = itertools.islice(elements, 1)
        self.first_pass = FirstPass(map(self._cut, elements), _name(function))
        """The pass that counted the batches; its batches are those of the first epoch."""
        if not self.first_pass.count:
            raise DataError(f"{_name(function)} gives no batches.")
        self.steps_per_epoch = steps_per_epoch or self.first_pass.count
        self._counted = steps_per_epoch is None

    def batches(self, start_step: int) -> Iterator[Batch]:
        """See `TrainingData.batches`."""
        # If each call yields one epoch, earlier ones need not be read.
        skipped = start_step % self.steps_per_epoch if self._counted else start_step
        if skipped < self.first_pass.count and self.first_pass.kept:
            yield from self.first_pass.take(skipped)
            skipped = 0 if self._counted else 1
        elements = itertools.islice(self._elements(), skipped, None)
        yield from ahead(itertools.repeat(lambda: self._cut(next(elements))), limit=PREFETCH)

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
                    f"{_name(self._function)} ended after {step - begin} batches, within an epoch of "
                    f"{self.steps_per_epoch} steps: pass another steps_per_epoch, or none to count them."
                )


class StreamEvaluation:
    """This replica's slice of every batch of a finite stream, in order; can be iterated repeatedly.

    Raises:
        ConfigError: it never ends.
    """

    def __init__(self, data: Any, *, index: int, size: int) -> None:
        if isinstance(data, keras.utils.PyDataset) and data.num_batches is None:
            raise ConfigError(f"{_name(data)} never ends (num_batches is None): pass {opt('validation_steps', 'N')}.")
        self._data = data
        self._cut = Cut(0, index, size, _name(data))

    def __iter__(self) -> Iterator[Batch]:
        if isinstance(self._data, keras.utils.PyDataset):
            return _read_numbers(self._data, np.arange(self._data.num_batches), self._cut)
        return (self._cut(elements) for elements in _call(self._data))


class _Mapped(keras.utils.PyDataset):
    """A PyDataset with a function applied to its batches."""

    def __init__(self, dataset: keras.utils.PyDataset, change: Callable[..., Elements]) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._change = change

    @property
    def num_batches(self) -> int | None:
        return self._dataset.num_batches

    def __getitem__(self, index: int) -> Elements:
        return self._change(*standard(_item(self._dataset, index), _name(self._dataset)))

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def _read_numbers(dataset: keras.utils.PyDataset, numbers: np.ndarray, cut: Cut) -> Iterator[Batch]:
    workers = max(1, dataset.workers)
    limit = dataset.max_queue_size if workers > 1 else PREFETCH
    # Prefetch this replica's slice, not the whole batch.
    return ahead((partial(_read, dataset, int(n), cut) for n in numbers), workers=workers, limit=limit)


def _read(dataset: keras.utils.PyDataset, number: int, cut: Cut) -> Batch:
    return cut(_item(dataset, number))


def _item(dataset: keras.utils.PyDataset, number: int) -> Any:
    """Return a batch of a PyDataset; inputs alone become `(inputs,)`, as in Keras."""
    batch = dataset[number]
    return batch if isinstance(batch, tuple | list) else (batch,)


def _call(function: BatchFunction) -> Iterator[Any]:
    returned = function()
    if not hasattr(returned, "__iter__") or isinstance(returned, tuple | dict):
        raise DataError(
            f"{_name(function)} must be a generator function of global batches. It returned: {type(returned).__name__}."
        )
    return iter(returned)


def _name(data: Any) -> str:
    return type(data).__name__ if isinstance(data, keras.utils.PyDataset) else getattr(data, "__name__", repr(data))


def _warn_of_processes(dataset: keras.utils.PyDataset) -> None:
    if dataset.use_multiprocessing:
        warn_on_first(
            f"{_name(dataset)} asks for use_multiprocessing: its batches are read by {max(1, dataset.workers)} threads "
            "instead, as a process that runs an exchange must not be forked.",
            stacklevel=2,
        )
