"""This replica's shards of the model's variables."""

from math import prod
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras_variables import rename, set_state
from hvdtrain.runtime.placement import extent_within, placement_of
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.variables import fill_memory, free_memory, unwrap
from hvdtrain.training.update_rules.zero.initial_slice import Released, taken_slice

SMALL_BYTES = 64 * 1024
"""Variables up to this size stay full: an all-reduce of 64 KB takes as long as one of 1 KB, over MPI and Gloo."""


class Shard:
    """This replica's shard of one variable, flattened.

    Of a variable that is itself sharded, such as along `tp`, it consists of full rows, so that its position in the full
    variable is a box: any layout can restore it.
    """

    def __init__(self, whole: Any, exchange: Collectives, path: str = "") -> None:
        self.whole = whole
        initial = taken_slice(whole)
        self.begins_released = initial is not None
        """Whether the full value was never kept: a builder has kept this shard of it."""
        self.variable = unwrap(whole)
        self.path = path
        self.exchange = exchange
        self.elements = int(tf.TensorShape(whole.shape).num_elements())
        self._placement = placement_of(whole)
        self._dim, row = (0, 1) if self._placement is None else _rows(tuple(whole.shape))
        self._row = row
        self.length = slice_length(self.elements // row, exchange.size) * row
        """Elements of the first replica's shard; the last ones may have fewer."""
        self.bytes = self.elements * self.variable.dtype.size
        """Bytes of the full variable."""
        self.begin, self.end = flat_slice(self.elements, exchange, row)
        mine = self.cut() if initial is None else initial.values
        # A layer of mixed precision would read it in 16 bits, and reduce its gradient in them.
        self.master = keras.Variable(mine, dtype=whole.dtype, trainable=True, autocast=False, name=whole.name)
        # Optimizers derive slot names and weight decay from the path and dims of the variable.
        rename(self.master, whole.path)
        self.master.whole = whole

    def cut(self, whole: Any = None) -> tf.Tensor:
        """Return the shard of the full variable's current value, or of another tensor of its shape."""
        return tf.reshape(self.variable if whole is None else whole, [-1])[self.begin : self.end]

    def named_tensor(self, value: Any) -> NamedTensor:
        """Return `value`, of the shard's shape, with its position.

        The full tensor is flat unless the variable is split along another axis.
        """
        if self._placement is None:
            return NamedTensor(value, (self.elements,), (slice(self.begin, self.end),), replicated=False)
        box = list(self._placement.box)
        box[self._dim] = extent_within(box[self._dim], self.begin // self._row, self.end // self._row)
        return NamedTensor(value, self._placement.global_shape, tuple(box), replicated=False)

    def fill(self, whole: tf.Tensor) -> Any:
        """Assign the full value, re-allocating the buffer if it was released."""
        return fill_memory(self.variable, whole)

    def release(self) -> None:
        """Free the full variable, which cannot be read or assigned until `reveal`."""
        free_memory(self.variable)
        set_state(self.whole, Released())

    def reveal(self) -> None:
        """Make the refilled full variable accessible."""
        set_state(self.whole, None)

    def fill_master(self) -> None:
        """Copy the full variable's shard into the master, even a released one.

        May share the full variable's memory until one of them is updated: `fill_master_apart` does not.
        """
        fill_memory(unwrap(self.master), self.cut())

    def fill_master_apart(self) -> None:
        """Like `fill_master`, but into separate memory, to free the full variable."""
        fill_memory(unwrap(self.master), tf.raw_ops.DeepCopy(x=self.cut()))

    def release_master(self) -> Any:
        """Free the master; return the operation within a graph."""
        return free_memory(unwrap(self.master))


def slice_length(elements: int, replicas: int) -> int:
    """Return the elements per shard; the last ones may have fewer, or none."""
    return -(-elements // replicas)


def flat_slice(elements: int, exchange: Collectives, row: int = 1) -> tuple[int, int]:
    """Return this replica's range of a flattened variable, in full rows."""
    length = slice_length(elements // row, exchange.size) * row
    begin = min(exchange.index * length, elements)
    return begin, min(begin + length, elements)


def stays_whole(variable: Any) -> bool:
    """Return whether a variable stays unsharded: small, constrained or summed outside replicas.

    Keras applies a constraint to the full value after each update. A gradient that is summed over other ranks than the
    replicas, such as of a norm under sequence parallelism, is not worth sharding.
    """
    placement = placement_of(variable)
    if variable.constraint is not None or (placement is not None and placement.summed_over):
        return True
    elements = int(tf.TensorShape(variable.shape).num_elements())
    return elements * tf.as_dtype(variable.dtype).size <= SMALL_BYTES


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the first dim with several elements, and its rows' size."""
    dim = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    return dim, prod(shape[dim + 1 :])
