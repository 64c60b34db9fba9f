"""Bound on the memory of full tensors, by ordering a graph's operations."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.training.update_rules.zero.shards import Shard

LARGEST = 2
"""Largest tensors that may be full at a time: one is communicated while the next is computed."""


class Window:
    """Limits full tensors to `room` bytes (or one) by control dependencies."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: deque[tuple[int, Any]] = deque()

    def before(self, size: int) -> list[Any]:
        """Return the operations to wait for before allocating `size` bytes."""
        done = []
        while self._held and sum(held for held, _ in self._held) + size > self._room:
            done.append(self._held.popleft()[1])
        return done

    def add(self, size: int, end: Any) -> None:
        """Count `size` bytes until the operation `end` has run."""
        self._held.append((size, end))


def window_for(shards: Iterable[Shard]) -> Window:
    """Return the window for tensors as large as these variables."""
    return Window(LARGEST * max((shard.bytes for shard in shards), default=0))


def size_of(tensor: tf.Tensor) -> int:
    """Return the bytes of a tensor of static shape."""
    return int(tensor.shape.num_elements()) * int(tensor.dtype.size)
