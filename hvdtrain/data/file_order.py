"""An order for slow disks: each rank reads its share of the files sequentially.

An epoch has the same samples as in `Order`, each once, but which share a batch depends on the number of ranks.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.data import Tail
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import split_bounds
from hvdtrain.data.order import Order
from hvdtrain.data.source import Source

WINDOW = 10_000
"""Samples within which the order is shuffled, like the size of a shuffle buffer."""


class FileOrder:
    """Files in an order decided by (seed, epoch), concatenated and split evenly over the replicas.

    A replica's share may end within a file: shares differ by one sample at most. An epoch must end on as many replicas
    as it began on, since the shares depend on their number.

    Args:
        source: samples in files; `source.file_of` [samples] is the file of each.
        batch: samples of a global batch.
        seed: decides the order, together with the epoch.
        shuffle: False reads the files in order.
        tail: see `DataConfig.tail`.

    Raises:
        ConfigError: the samples are not in files.
    """

    def __init__(self, source: Source, batch: int, seed: int, shuffle: bool = True, tail: Tail = "pad") -> None:
        file_of = getattr(source, "file_of", None)
        if file_of is None:
            raise ConfigError(
                f"--shard-by files is for samples in files. {source.name} is not read from any, or is kept by --cache."
            )
        # Number and lengths of the batches do not depend on the order.
        self.counts = Order(samples=source.size, batch=batch, seed=seed, shuffle=shuffle, tail=tail)
        _, sizes = np.unique(file_of, return_counts=True)
        self._files = np.split(np.argsort(file_of, kind="stable"), np.cumsum(sizes)[:-1])
        """For each file, the numbers of its samples."""

    @property
    def full_batches(self) -> int:
        """Full batches of an epoch."""
        return self.counts.full_batches

    @property
    def rest(self) -> int:
        """Samples of an epoch's last, short batch; 0 if there is none."""
        return self.counts.rest

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.counts.steps_per_epoch

    @property
    def seed(self) -> int:
        """The seed of the order."""
        return self.counts.seed

    def slice_numbers(self, epoch: Any, first: int, steps: int, samples: int, index: int, size: int) -> tf.Tensor:
        """See `Order.slice_numbers`."""

        def rows(epoch: np.ndarray) -> np.ndarray:
            mine = self._mine(int(epoch), index, size)
            begin, end = (self.counts.batch * first // size, samples * steps // size)
            if samples < self.counts.batch:
                end = max(1, len(mine) - begin)  # one that does not count, where there is none left
            # Past its end a share begins again (--tail repeat).
            return mine[np.minimum(begin + np.arange(end), _last(mine, self.counts.tail)) % len(mine)].reshape(
                steps, -1
            )

        numbers = tf.numpy_function(rows, [tf.cast(epoch, tf.int64)], tf.int64)
        begin, end = split_bounds(samples, index, size)
        return tf.ensure_shape(numbers, [steps, max(1, end - begin)])

    def _mine(self, epoch: int, index: int, size: int) -> np.ndarray:
        rng = np.random.default_rng([self.counts.seed, epoch])
        files = rng.permutation(len(self._files)) if self.counts.shuffle else range(len(self._files))
        numbers = np.concatenate([self._files[file] for file in files])
        begin, end = split_bounds(len(numbers), index, size)
        mine = numbers[begin:end]
        if not len(mine):
            return numbers[:1]  # fewer samples than replicas: one that does not count
        if not self.counts.shuffle:
            return mine
        positions = np.arange(len(mine)) + rng.uniform(0, WINDOW, len(numbers))[begin:end]
        return mine[np.argsort(positions, kind="stable")]


def _last(mine: np.ndarray, tail: Tail) -> int:
    return 2 * len(mine) if tail == "repeat" else len(mine) - 1
