"""Data of a loop of the user's own: a Dataset divided among the ranks, and an order of indices that is."""

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.config.errors import ConfigError, NoSamplesError
from hvdtrain.data.batch import per_replica
from hvdtrain.data.order import Order
from hvdtrain.data.pipeline import no_autograph
from hvdtrain.data.streams.given import Given, check_given, content_of
from hvdtrain.data.streams.sharded_dataset import Shard, batch_size_of, first_and_shards, length_of
from hvdtrain.runtime.session import current


def shard(dataset: tf.data.Dataset, batch: int | None = None, *, drop_remainder: bool = False) -> tf.data.Dataset:
    """Return this rank's shard of every global batch of `dataset`. Collective.

    The dataset must be the same on every rank. All ranks take equally many steps of equally many samples: some samples
    of a short last batch go to two ranks. Samples of other ranks are not mapped if the order allows.

    Args:
        dataset: global batches; or samples, with `batch`.
        batch: samples of a step over all ranks.
        drop_remainder: leave out a short last batch; for samples.

    Raises:
        ConfigError: a batch that does not divide among the ranks, or none.
        DataError: no samples, or ranks that were given other samples.

    Example::

        dataset = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(100, seed=1)  # the same on every rank
        for part_x, part_y in hvdtrain.shard(dataset, batch=16):
            step(part_x, part_y)
    """
    backend = backend_for(current())
    if drop_remainder and batch is None:
        raise ConfigError("drop_remainder is for samples: pass batch=N too, or batch(N, drop_remainder=True) before.")
    if batch is not None:
        per_replica(batch, backend.processes)
    batches = dataset if batch is None else dataset.batch(batch, drop_remainder=drop_remainder)
    full = batch_size_of(batches)
    if full is not None:
        per_replica(full, backend.processes)
    return _sharded(dataset, batches, backend)


def _sharded(dataset: tf.data.Dataset, batches: tf.data.Dataset, backend: Backend) -> tf.data.Dataset:
    first, shards = first_and_shards(batches, backend.process, backend.processes, owner=dataset)
    if first is None:
        raise NoSamplesError("The dataset is empty.")
    tensors = tf.nest.flatten(first)
    if any(tensor.shape.rank == 0 for tensor in tensors):
        raise ConfigError(
            "The dataset is not batched: pass shard(dataset, batch=N), the samples per step of all ranks."
        )
    rows = len(tensors[0])
    check_given(
        lambda: Given("a Dataset", rows, length_of(batches), content_of((first,))),
        backend,
        "training",
        "Give shuffle() a seed",
    )
    if shards is not None:
        parts = shards.parts(backend.process, backend.processes, even=True)
        return parts.map(no_autograph(lambda elements, *_: elements)).prefetch(tf.data.AUTOTUNE)
    own = Shard(rows, backend.process, backend.processes, even=True)
    is_tuple = type(batches.element_spec) is tuple
    cut = no_autograph(lambda *elements: own.cut(elements if is_tuple else elements[0]))
    return batches.map(cut).prefetch(tf.data.AUTOTUNE)


class ShardedOrder:
    """Sampler of this rank's indices, step by step, in the order in which `Trainer.fit` visits arrays.

    All ranks take equally many steps of equally many indices: some indices of a short last batch go to two ranks. Like
    PyTorch's `DistributedSampler`, but the global batches do not depend on the number of ranks.

    Args:
        samples: number of samples.
        batch: samples of a step over all ranks.
        seed: seed of the order, combined with the epoch.
        shuffle: visit the samples in a new order every epoch.
        drop_remainder: leave out a short last batch.
        rank: this rank among `size`; the session's by default.
        size: number of ranks.

    Raises:
        ConfigError: a batch that does not divide among the ranks, or is larger than all samples that are not dropped.

    Example::

        order = hvdtrain.ShardedOrder(len(x), batch=16, seed=1)
        for epoch in range(2):
            for rows in order.indices(epoch):
                step(x[rows], y[rows])
    """

    def __init__(
        self,
        samples: int,
        batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_remainder: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        if samples < 1:
            raise NoSamplesError(f"An order needs at least one sample. Received: {samples}.")
        backend = None if rank is not None and size is not None else backend_for(current())
        self._size = size if size is not None else backend.processes if backend else 1
        self._rank = rank if rank is not None else backend.process if backend else 0
        per_replica(batch, self._size)
        if drop_remainder and samples < batch:
            raise ConfigError(f"drop_remainder would leave nothing of {samples} samples in batches of {batch}.")
        self._order = Order(
            samples=samples, batch=batch, seed=seed, shuffle=shuffle, tail="drop" if drop_remainder else "pad"
        )

    def __len__(self) -> int:
        """Return the steps of an epoch, the same on every rank."""
        return self._order.steps_per_epoch

    def indices(self, epoch: int) -> Iterator[np.ndarray]:
        """Yield the indices [n] of each step of `epoch`, counted from 0."""
        for step in range(len(self)):
            begin = step * self._order.batch
            total = min(self._order.batch, self._order.samples - begin)
            rows = -(-total // self._size)
            positions = begin + np.arange(self._rank * rows, (self._rank + 1) * rows) % total
            yield self._order.numbers(epoch, positions).numpy()
