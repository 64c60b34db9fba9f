"""Horovod's collectives as training calls them, each under a name that the ranks share."""

import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.compat import horovod as ops
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.compiled import run_once
from hvdtrain.runtime.guarded import guarded, kept
from hvdtrain.runtime.hierarchy import sum_by_host
from hvdtrain.runtime.packing import buffers, pack, unpack
from hvdtrain.runtime.tuning import fuses
from hvdtrain.runtime.turns import turn_of

ReduceOp = Literal["sum", "average", "adasum", "min", "max", "product"]

_OPS = {
    **{"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum},
    **{"min": hvd.Min, "max": hvd.Max, "product": hvd.Product},
}
_MOVED_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}
"""dtypes that Horovod does not move, and those of their bits."""
PACKED_BYTES = 2**25
"""Variables of a broadcast that share a message are copied twice: so many bytes at a time."""
TWO_LEVEL_BYTES = 64 * 1024
"""Smaller sums go through all ranks at once: three messages cost more than one that is hardly longer."""


def collective_name(*parts: str) -> str:
    """Join `axis, role, path, …` to the name by which the ranks match an op.

    It is a pure function of its parts, so that a retrace on one rank changes nothing. Slashes would
    be read as name scopes, and only the part after the last one is the key; TensorFlow takes ASCII alone.
    """
    name = ".".join(parts)
    clean = "".join(c if (c.isascii() and c.isalnum()) or c in "._-" else "." for c in name)
    return clean if clean == name else f"{clean}.{zlib.crc32(name.encode()):08x}"


@dataclass(frozen=True, kw_only=True)
class AxisGroup:
    """The ranks that exchange with one another along one axis of the mesh, or in a process set of Horovod's."""

    axis: str
    """The first part of the names of their collectives."""
    ranks: tuple[int, ...]
    """Their ranks in the world, ascending."""
    index: int
    """This rank's place among them."""
    process_set: Any
    """Horovod's set of these ranks; None for a rank that is alone in a larger world."""
    by_host: "HostGroups | None" = None
    """For sums in two levels; None where every sum goes through all ranks at once."""


@dataclass(frozen=True)
class HostGroups:
    """A rank's groups for sums in two levels; see `hvdtrain.runtime.hierarchy`."""

    local: AxisGroup
    """The ranks of its host."""
    crossing: AxisGroup | None
    """The ranks that it exchanges with on other hosts; None if it is no bridge."""
    bridges: int
    """How many ranks of each host exchange with other hosts."""


class AxisCollectives:
    """Collectives among the ranks of one group.

    Names are `role/path/…`; every rank of the group must use the same ones. They may be used eagerly and within
    compiled functions, along several axes at once.
    """

    def __init__(self, group: AxisGroup) -> None:
        self.group = group
        self.size = len(group.ranks)
        self.index = group.index
        self.sends = group.process_set is not None
        self.by_host = None if group.by_host is None else TwoLevelSum(group.by_host)
        # Of a sum in two levels Horovod could put nothing but the middle part into a message with others.
        self.fuses = self.by_host is None and fuses(os.environ)

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Reduce `tensor` elementwise over the ranks; shape and dtype must agree on all of them.

        `prescale` and `postscale` multiply the input and the result within the exchange.
        16-bit brain floats, which Horovod cannot add, travel as float32.
        """
        if op == "adasum" and not hvd.mpi_enabled():
            raise ConfigError("Adasum needs MPI: start with mpirun, or horovodrun --mpi.")
        if self.by_host is not None and op in ("sum", "average") and self.by_host.suits(tensor):
            after = postscale / self.size if op == "average" else postscale
            return self.by_host.all_reduce(tensor, name=name, prescale=prescale, postscale=after)
        return self._reduce(
            _one(ops.all_reduce), tensors=[tensor], name=name, op=op, prescale=prescale, postscale=postscale
        )[0]

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum each of `tensors`, of one dtype, over the ranks in one message; none leaves before all are there."""
        if not self.fuses and self.size > 1 and len(tensors) > 1:
            packed = self.all_reduce(pack(tensors), name=f"{name}/packed", prescale=prescale, postscale=postscale)
            return unpack(packed, tensors)
        return self._reduce(
            ops.grouped_all_reduce, tensors=tensors, name=name, op="sum", prescale=prescale, postscale=postscale
        )

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Sum `tensor` over the ranks, of which each keeps its slice of dim 0.

        Slices are consecutive; where they cannot be equal, the first ranks keep one row more than the last.
        """
        return self._scatter(
            _one(ops.reduce_scatter), tensors=[tensor], name=name, prescale=prescale, postscale=postscale
        )[0]

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Do `reduce_scatter` for each of `tensors`, of one dtype, in one message."""
        return self._scatter(
            ops.grouped_reduce_scatter, tensors=tensors, name=name, prescale=prescale, postscale=postscale
        )

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate the ranks' tensors along dim 0, where their sizes may differ."""
        return self._move(_one(mpi_ops.allgather), [tensor], name)[0]

    def grouped_all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Do `all_gather` for each of `tensors`, of one dtype, in one message."""
        return self._move(mpi_ops.grouped_allgather, tensors, name)

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Cut `tensor` into equal parts along dim 0, send part i to rank i, and line up what came, by rank.

        Dim 0 must be the same multiple of the ranks on all of them; the result has the shape of `tensor`.
        """
        return tf.ensure_shape(self._move(_one(mpi_ops.alltoall), [tensor], name)[0], tensor.shape)

    def scatter_rows(self, tensor: tf.Tensor, rows: Sequence[int], *, name: str) -> tf.Tensor:
        """Send `rows[i]` consecutive rows of `tensor` to rank i, and line up what came, by rank."""
        if self.group.process_set is None:
            return tensor

        def operation(tensors: Sequence[tf.Tensor], **options: Any) -> list[tf.Tensor]:
            return [mpi_ops.alltoall(tensors[0], splits=guarded(tf.constant(rows, tf.int32)), **options)[0]]

        return self._move(operation, [tensor], name)[0]

    def exchange_rows(self, tensor: tf.Tensor, rows: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Send `rows[i]` consecutive rows of `tensor` to rank i.

        Args:
            tensor: of the same shape on all ranks but for dim 0.
            rows: int32 [ranks], different on each rank; they add up to the rows of `tensor`. Empty: equal parts.
            name: see `AxisCollectives`.

        Returns:
            What came, lined up by rank, and how many rows of each, int32 [ranks].
        """
        if self.group.process_set is None:
            return tensor, rows

        def operation(tensors: Sequence[tf.Tensor], **options: Any) -> list[tf.Tensor]:
            return list(mpi_ops.alltoall(tensors[0], splits=guarded(rows), **options))

        bits = _MOVED_AS.get(tensor.dtype)
        came, counts = self._call(operation, [tensor if bits is None else tf.bitcast(tensor, bits)], name)
        came = came if bits is None else tf.bitcast(came, tensor.dtype)
        if not tf.executing_eagerly():
            came.set_shape([None, *tensor.shape[1:]])
            if rows.shape != [0]:  # Horovod's shape function takes the shape of empty rows for that of the counts
                counts.set_shape([self.size])
        return came, counts

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0) -> None:
        """Assign the values that rank `root` of the group has, by path, in the order of the paths.

        Many share a message: one for each variable of a large model and its optimizer takes seconds to trace. A script
        may do it within a function of its own, which is a function of ours there, so that AutoGraph leaves it alone.
        """
        if self.group.process_set is None:
            return
        if tf.executing_eagerly():
            self._broadcast(tensors, root)
        else:
            run_once(lambda: self._broadcast(tensors, root))

    def _broadcast(self, tensors: Mapping[str, tf.Variable], root: int) -> None:
        for paths in _packs(tensors):
            variables = [tensors[path] for path in paths]
            values = [variable.read_value() for variable in variables]
            whole = values[0] if len(values) == 1 else pack(values)
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            came = self.broadcast_value(whole, root=root, name=f"broadcast/{paths[0]}{more}")
            for variable, part in zip(variables, [came] if len(values) == 1 else unpack(came, values), strict=True):
                variable.assign(part)

    def broadcast_value(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Return the tensor that rank `root` of the group gave; shape and dtype must agree on all of them."""
        return self._move(_one(mpi_ops.broadcast), [tensor], name, root_rank=self.group.ranks[root])[0]

    def _reduce(
        self,
        operation: Callable[..., Any],
        tensors: Sequence[tf.Tensor],
        name: str,
        op: ReduceOp,
        prescale: float,
        postscale: float,
    ) -> list[tf.Tensor]:
        dtype = tensors[0].dtype
        if dtype == tf.bfloat16:
            tensors = [tf.cast(tensor, tf.float32) for tensor in tensors]
        after = postscale / self.size if op == "average" else postscale
        if self.group.process_set is None:
            results = [_times(tensor, prescale * after) for tensor in tensors]
        else:
            factors = {"prescale_factor": prescale, "postscale_factor": after}
            results = self._call(operation, tensors, name, op=_OPS["sum" if op == "average" else op], **factors)
        return [tf.cast(result, dtype) for result in results] if dtype == tf.bfloat16 else results

    def _scatter(
        self,
        operation: Callable[..., Any],
        tensors: Sequence[tf.Tensor],
        name: str,
        prescale: float,
        postscale: float,
    ) -> list[tf.Tensor]:
        if not self.fuses:  # Horovod scales in its fusion buffer, and has none
            tensors, prescale = [_times(tensor, prescale) for tensor in tensors], 1.0
        slices = self._reduce(operation, tensors=tensors, name=name, op="sum", prescale=prescale, postscale=postscale)
        if not tf.executing_eagerly():
            for tensor, mine in zip(tensors, slices, strict=True):
                mine.set_shape([self._rows(tensor.shape[0]), *tensor.shape[1:]])
        return slices

    def _rows(self, rows: int | None) -> int | None:
        """Return how many of so many rows this rank keeps."""
        return None if rows is None else rows // self.size + (self.index < rows % self.size)

    def _move(
        self, operation: Callable[..., Any], tensors: Sequence[tf.Tensor], name: str, **options: Any
    ) -> list[tf.Tensor]:
        """Call an operation that only moves elements, as bits where Horovod does not know their dtype."""
        if self.group.process_set is None:
            return list(tensors)
        dtype = tensors[0].dtype
        bits = _MOVED_AS.get(dtype)
        if bits is None:
            return self._call(operation, tensors, name, **options)
        moved = self._call(operation, [tf.bitcast(tensor, bits) for tensor in tensors], name, **options)
        return [tf.bitcast(tensor, dtype) for tensor in moved]

    def _call(
        self, operation: Callable[..., Any], tensors: Sequence[tf.Tensor], name: str, **options: Any
    ) -> list[tf.Tensor]:
        """Call one of Horovod's operations, under the full name and kept what it is."""
        full = collective_name(self.group.axis, name)
        turn = turn_of(self.group.process_set)
        with tf.control_dependencies([] if turn is None else turn.before()):
            inputs = [guarded(tensor) for tensor in tensors]
        outputs = operation(inputs, name=full, ignore_name_scope=True, process_set=self.group.process_set, **options)
        if turn is not None:
            turn.after(outputs[0].op)
        return list(kept(outputs, full))


def _packs(tensors: Mapping[str, tf.Variable]) -> Iterator[list[str]]:
    """Yield the paths of variables of one dtype that go together, alike on all ranks: up to `PACKED_BYTES`, or one."""
    order = sorted(tensors, key=lambda path: (tensors[path].dtype.name, path))
    for _, group in groupby(order, lambda path: tensors[path].dtype):
        alike = list(group)
        for places in buffers([tensors[path] for path in alike], PACKED_BYTES):
            yield [alike[place] for place in places]


class TwoLevelSum:
    """Sums inside each host first, then between the hosts; see `hvdtrain.runtime.hierarchy`."""

    def __init__(self, groups: HostGroups) -> None:
        self._local = AxisCollectives(groups.local)
        self._crossing = None if groups.crossing is None else AxisCollectives(groups.crossing)
        self._bridges = groups.bridges

    def suits(self, tensor: tf.Tensor) -> bool:
        """Tell whether a sum of tensors of this shape and dtype, the same on all ranks, is worth two levels."""
        elements = tensor.shape.num_elements()
        return elements is not None and elements * tensor.dtype.size >= TWO_LEVEL_BYTES

    def all_reduce(self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0) -> tf.Tensor:
        """Sum `tensor`, of a static shape, elementwise over all ranks; the factors multiply input and result."""

        def between(mine: tf.Tensor, crossing: AxisCollectives) -> tf.Tensor:
            return crossing.all_reduce(mine, name=name, postscale=postscale)

        wide = tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor
        return tf.cast(self.sum(_times(wide, prescale), between, name=name), tensor.dtype)

    def sum(
        self, tensor: tf.Tensor, between: Callable[[tf.Tensor, "AxisCollectives"], tf.Tensor], *, name: str
    ) -> tf.Tensor:
        """Sum `tensor` inside each host, each slice of it by `between` over the hosts, and gather the whole.

        Args:
            tensor: this rank's, of the same static shape on all of them.
            between: is given a slice, a vector, and the ranks of other hosts that hold the same slice.
            name: tells this sum from every other.
        """
        crossing = self._crossing
        add = None if crossing is None else lambda mine: between(mine, crossing)
        return sum_by_host(tensor, self._local, self._bridges, add, name=name)


def _one(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation on one tensor as one on a list."""
    return lambda tensors, **options: [operation(tensors[0], **options)]


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return tensor if factor == 1.0 else tensor * factor
