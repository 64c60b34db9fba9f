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


class FileOrder(Order):
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

    _files: list[np.ndarray]
    """The numbers of the samples of each file."""

    def __init__(self, source: Source, batch: int, seed: int, shuffle: bool = True, tail: Tail = "pad") -> None:
        file_of = getattr(source, "file_of", None)
        if file_of is None:
            raise ConfigError(
                f"--shard-by files is for samples in files. {source.name} is not read from any, or is kept by --cache."
            )
        super().__init__(samples=source.size, batch=batch, seed=seed, shuffle=shuffle, tail=tail)
        _, sizes = np.unique(file_of, return_counts=True)
        files = np.split(np.argsort(file_of, kind="stable"), np.cumsum(sizes)[:-1])
        object.__setattr__(self, "_files", files)  # an Order is frozen

    def slice_numbers(self, epoch: Any, first: int, steps: int, samples: int, index: int, size: int) -> tf.Tensor:
        def rows(epoch: np.ndarray) -> np.ndarray:
            mine = self._mine(int(epoch), index, size)
            begin, end = (self.batch * first // size, samples * steps // size)
            if samples < self.batch:
                end = max(1, len(mine) - begin)  # one that does not count, where there is none left
            # Past its end a share begins again (--tail repeat).
            last = 2 * len(mine) if self.tail == "repeat" else len(mine) - 1
            return mine[np.minimum(begin + np.arange(end), last) % len(mine)].reshape(steps, -1)

        numbers = tf.numpy_function(rows, [tf.cast(epoch, tf.int64)], tf.int64)
        begin, end = split_bounds(samples, index, size)
        return tf.ensure_shape(numbers, [steps, max(1, end - begin)])

    def _mine(self, epoch: int, index: int, size: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, epoch])
        files = rng.permutation(len(self._files)) if self.shuffle else range(len(self._files))
        numbers = np.concatenate([self._files[file] for file in files])
        begin, end = split_bounds(len(numbers), index, size)
        mine = numbers[begin:end]
        if not len(mine):
            return numbers[:1]  # fewer samples than replicas: one that does not count
        if not self.shuffle:
            return mine
        positions = np.arange(len(mine)) + rng.uniform(0, WINDOW, len(numbers))[begin:end]
        return mine[np.argsort(positions, kind="stable")]
