"""Horovod's collectives as training calls them, each under a name that the ranks share."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.compiled import run_once
from hvdtrain.runtime.guarded import guarded, kept

ReduceOp = Literal["sum", "average", "adasum"]

_OPS = {"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}
_MOVED_AS = {tf.bfloat16: tf.uint16, tf.uint32: tf.int32, tf.uint64: tf.int64}
"""dtypes that Horovod does not move, and those of their bits."""


def collective_name(*parts: str) -> str:
    """Join `axis, role, path, …` to the name by which the ranks match an op.

    It is a pure function of its parts, so that a retrace on one rank changes nothing. Slashes would
    be read as name scopes, and only the part after the last one is the key; TensorFlow takes ASCII alone.
    """
    name = ".".join(parts)
    clean = "".join(c if (c.isascii() and c.isalnum()) or c in "._-" else "." for c in name)
    return clean if clean == name else f"{clean}.{zlib.crc32(name.encode()):08x}"


@dataclass(frozen=True)
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


class AxisCollectives:
    """Collectives among the ranks of one group.

    Names are `role/path/…`; every rank of the group must use the same ones. They may be used eagerly and within
    compiled functions, along several axes at once.
    """

    def __init__(self, group: AxisGroup) -> None:
        self.group = group
        self.size = len(group.ranks)
        self.index = group.index

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Reduce `tensor` elementwise over the ranks; shape and dtype must agree on all of them.

        `prescale` and `postscale` multiply the input and the result within the exchange.
        16-bit brain floats, which Horovod cannot add, travel as float32.
        """
        if op == "adasum" and not hvd.mpi_enabled():
            raise ConfigError("Adasum needs MPI: start with mpirun, or horovodrun --mpi.")
        return self._reduce(_one(mpi_ops._allreduce), [tensor], name, op, prescale, postscale)[0]

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum each of `tensors`, of one dtype, over the ranks in one message; none leaves before all are there."""
        return self._reduce(mpi_ops._grouped_allreduce, tensors, name, "sum", prescale, postscale)

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Sum `tensor` over the ranks, of which each keeps its slice of dim 0.

        Slices are consecutive; where they cannot be equal, the first ranks keep one row more than the last.
        """
        return self._scatter(_one(mpi_ops._reducescatter), [tensor], name, prescale, postscale)[0]

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Do `reduce_scatter` for each of `tensors`, of one dtype, in one message."""
        return self._scatter(mpi_ops._grouped_reducescatter, tensors, name, prescale, postscale)

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

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0) -> None:
        """Assign the values that rank `root` of the group has, by path.

        All in one compiled call, in which the ranks match them by name and not by order.
        """
        world_root = self.group.ranks[root]

        def assign_all() -> None:
            for path, variable in tensors.items():
                name = f"broadcast/{path}"
                variable.assign(
                    self._move(_one(mpi_ops.broadcast), [variable.read_value()], name, root_rank=world_root)[0]
                )

        run_once(assign_all)

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
        slices = self._reduce(operation, tensors, name, "sum", prescale, postscale)
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
        inputs = [guarded(tensor) for tensor in tensors]
        outputs = operation(inputs, name=full, ignore_name_scope=True, process_set=self.group.process_set, **options)
        return list(kept(outputs, full))


def _one(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation on one tensor as one on a list."""
    return lambda tensors, **options: [operation(tensors[0], **options)]


def _times(tensor: tf.Tensor, factor: float) -> tf.Tensor:
    return tensor if factor == 1.0 else tensor * factor
