"""A first pass over batches that nobody has counted: it counts them, and keeps them for the first epoch if they fit."""

import time
from collections.abc import Iterable, Iterator

import tensorflow as tf

from hvdtrain.data.batch import Batch
from hvdtrain.runtime.warning import warn_on_first

KEPT_MB = 256
"""MiB of batches that a rank keeps of a first pass, so that its samples need not be made twice."""
COUNTING_S = 20.0
"""Counting that takes longer is reported."""


class FirstPass:
    """The batches of a pass: their number, and the batches themselves while there is memory for them.

    Args:
        batches: this replica's slices, read to their end.
        name: the name of the data in messages.
    """

    def __init__(self, batches: Iterable[Batch], name: str) -> None:
        self.count = 0
        self._kept: list[Batch] | None = []
        begin, size, warned = time.monotonic(), 0, False
        for batch in batches:
            self.count += 1
            size += _bytes(batch)
            if self._kept is not None:
                self._kept.append(batch)
            if size > KEPT_MB * 2**20:
                self._kept = None
            if not warned and time.monotonic() - begin > COUNTING_S:
                warned = True
                warn_on_first(
                    f"{name} is being read to count its batches, {self.count} so far: pass steps_per_epoch, which it "
                    "needs if it does not end.",
                    stacklevel=2,
                )

    @property
    def kept(self) -> bool:
        """Whether the batches are still there."""
        return self._kept is not None

    def drop(self) -> None:
        """Give the batches up."""
        self._kept = None

    def take(self, start: int) -> Iterator[Batch]:
        """Yield the batches that were kept from number `start` on; they are given up behind the last one."""
        yield from (self._kept or [])[start:]
        self.drop()


def _bytes(batch: Batch) -> int:
    tensors = [part for part in tf.nest.flatten(tuple(batch)) if tf.is_tensor(part)]
    return sum(_bytes_of(tensor) for tensor in tensors)


def _bytes_of(tensor: tf.Tensor) -> int:
    if tensor.dtype == tf.string:
        return int(tf.reduce_sum(tf.strings.length(tensor)))
    return int(tf.size(tensor)) * int(tensor.dtype.size)
