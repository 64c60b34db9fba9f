"""This replica's slices of the model's variables."""

from math import prod
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras_variables import rename
from hvdtrain.runtime.placement import extent_within
from hvdtrain.state.memory import fill_memory, free_memory
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.placement import placement_of
from hvdtrain.state.variables import unwrap
from hvdtrain.training.update_rules.zero.initial_slice import taken_slice
from hvdtrain.training.update_rules.zero.out_of_reach import out_of_reach

SMALL_BYTES = 64 * 1024
"""Variables up to this size stay whole: an all-reduce of 64 KB takes as long as one of 1 KB, over MPI and Gloo."""


class Shard:
    """This replica's slice of one variable, laid out flat.

    Of a variable that is itself a slice, such as one along `tp`, it consists of whole rows, so that its place in the
    whole is a box: any layout can restore it.

    Args:
        whole: a Keras variable.
        exchange: the replicas that hold the same variable; see `slice_length`.
        path: the variable's structural path.
    """

    def __init__(self, whole: Any, exchange: Collectives, path: str = "") -> None:
        self.whole = whole
        initial = taken_slice(whole)
        self.begins_released = initial is not None
        """Whether the whole was never more than drawn: a builder has kept this slice of it."""
        self._kind = type(whole) if initial is None else initial.kind
        self.variable = unwrap(whole)
        self.path = path
        self.exchange = exchange
        self.elements = int(tf.TensorShape(whole.shape).num_elements())
        self._placement = placement_of(whole)
        self._dim, row = (0, 1) if self._placement is None else _rows(tuple(whole.shape))
        self._row = row
        self.length = slice_length(self.elements // row, exchange.size) * row
        """Elements of the slice of the first replica; the last ones may have fewer."""
        self.bytes = self.elements * self.variable.dtype.size
        """Of the whole."""
        self.begin, self.end = flat_slice(self.elements, exchange, row)
        mine = self.cut() if initial is None else initial.values
        # A layer of mixed precision would read it in 16 bits, and reduce its gradient in them.
        self.master = keras.Variable(mine, dtype=whole.dtype, trainable=True, autocast=False, name=whole.name)
        # Optimizers name their slots, and choose what decays, by the path and dims of the variable.
        rename(self.master, whole.path)
        self.master.whole = whole

    def cut(self) -> tf.Tensor:
        """Return the slice as the whole variable holds it now."""
        return tf.reshape(self.variable, [-1])[self.begin : self.end]

    def named_tensor(self, value: Any) -> NamedTensor:
        """Return `value`, of the slice's shape, with its place in the whole, which is flat if it is not split."""
        if self._placement is None:
            return NamedTensor(value, (self.elements,), (slice(self.begin, self.end),), replicated=False)
        box = list(self._placement.box)
        box[self._dim] = extent_within(box[self._dim], self.begin // self._row, self.end // self._row)
        return NamedTensor(value, self._placement.global_shape, tuple(box), replicated=False)

    def fill(self, whole: tf.Tensor) -> Any:
        """Let the whole variable hold these values, also after `release`; return the operation within a graph."""
        return fill_memory(self.variable, whole)

    def release(self) -> None:
        """Give back the memory of the whole variable, which can be neither looked at nor assigned to until `reveal`."""
        free_memory(self.variable)
        self.whole.__class__ = out_of_reach(self._kind)

    def reveal(self) -> None:
        """Let the whole variable, filled again, be looked at and assigned to."""
        self.whole.__class__ = self._kind

    def fill_master(self) -> None:
        """Let the master hold what the slice is in the whole variable, also after `release_master`.

        It may share the memory of the whole, until one of them is updated: see `fill_master_apart`.
        """
        fill_memory(unwrap(self.master), self.cut())

    def fill_master_apart(self) -> None:
        """Do what `fill_master` does, into memory of its own: the whole one can be given back."""
        fill_memory(unwrap(self.master), tf.raw_ops.DeepCopy(x=self.cut()))

    def release_master(self) -> Any:
        """Give back the memory of the master; return the operation within a graph."""
        return free_memory(unwrap(self.master))


def slice_length(elements: int, replicas: int) -> int:
    """Return the elements of a slice; the last ones may have fewer, or with very many replicas none."""
    return -(-elements // replicas)


def flat_slice(elements: int, exchange: Collectives, row: int = 1) -> tuple[int, int]:
    """Return begin and end of this replica's slice of a variable that is laid out flat, of whole rows of `row`."""
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
    """Return the first dim that holds several elements, and the elements of each of its rows."""
    dim = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    return dim, prod(shape[dim + 1 :])
