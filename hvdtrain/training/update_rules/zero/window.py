"""Bounds on the memory of full tensors: operations in order, and updates one after the other."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.compat.seams import UPDATE
from hvdtrain.optim.averaging import innermost
from hvdtrain.state.variables import unwrap
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


def has_lean_update(optimizer: Any) -> bool:
    """Return whether `optimizer` only updates variables one by one: no weight decay or averages."""
    return innermost(optimizer) is optimizer and not optimizer.weight_decay and not optimizer.use_ema


@contextmanager
def slice_updates(optimizer: Any, shards: Iterable[Shard], gather: Callable[[Shard], Any]) -> Iterator[None]:
    """Make `optimizer` update copies of shards, freed after the gather.

    The optimizer has a lean update and was built for the masters of `shards` and other variables; `gather` all-gathers
    an updated variable and returns the last operation.
    """
    by_master = {id(unwrap(shard.master)): shard for shard in shards}
    window = window_for(by_master.values())
    update = UPDATE.active(optimizer)

    def update_step(gradient: Any, variable: Any, learning_rate: Any) -> None:
        shard = by_master.get(id(variable))
        if shard is None:
            update(gradient, variable, learning_rate)
            return
        with tf.control_dependencies(window.before(shard.bytes)):
            shard.fill_master()
            update(gradient, variable, learning_rate)
            last = gather(shard)
        with tf.control_dependencies([last]):
            window.add(shard.bytes, shard.release_master())

    with UPDATE.replaced(optimizer, update_step):
        yield
