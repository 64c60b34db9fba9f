"""Horovod's collectives as training calls them, each under a name that the ranks share."""

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.guarded import guarded, kept

ReduceOp = Literal["sum", "average", "adasum"]

_OPS = {"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}
_UNSUMMABLE = (tf.bfloat16,)


def collective_name(*parts: str) -> str:
    """Join `axis, role, path, …` to the name by which the ranks match an op.

    It is a pure function of its parts, so that a retrace on one rank changes nothing. Slashes would
    be read as name scopes, and only the part after the last one is the key; TensorFlow takes ASCII alone.
    """
    name = ".".join(parts)
    clean = "".join(c if (c.isascii() and c.isalnum()) or c in "._-" else "." for c in name)
    return clean if clean == name else f"{clean}.{zlib.crc32(name.encode()):08x}"


class AxisCollectives:
    """AxisCollectives among the ranks along one axis of the mesh, or among those of one of Horovod's process sets."""

    def __init__(self, axis: str, rank: int, size: int, process_set: Any = hvd.global_process_set) -> None:
        self.axis = axis
        self.rank = rank
        self.size = size
        self._process_set = process_set

    def all_reduce(
        self,
        tensor: tf.Tensor,
        *,
        name: str,
        op: ReduceOp = "sum",
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> tf.Tensor:
        """Reduce `tensor` elementwise over the axis; shape and dtype must agree on all ranks.

        `prescale` and `postscale` multiply the input and the result within the exchange.
        16-bit brain floats, which Horovod cannot add, travel as float32.
        """
        if tensor.dtype in _UNSUMMABLE:
            wide = tf.cast(tensor, tf.float32)
            wide = self.all_reduce(wide, name=name, op=op, prescale=prescale, postscale=postscale)
            return tf.cast(wide, tensor.dtype)
        if op == "adasum" and not hvd.mpi_enabled():
            raise ConfigError("Adasum needs MPI: start with mpirun, or horovodrun --mpi.")
        output = mpi_ops._allreduce(
            guarded(tensor),
            name=name,
            op=_OPS["sum" if op == "average" else op],
            prescale_factor=prescale,
            postscale_factor=postscale / self.size if op == "average" else postscale,
            ignore_name_scope=True,
            process_set=self._process_set,
        )
        return kept(output, name)

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum each of `tensors` over the axis in one message per dtype; none leaves before all are there."""
        if tensors[0].dtype in _UNSUMMABLE:
            wide = [tf.cast(tensor, tf.float32) for tensor in tensors]
            sums = self.grouped_all_reduce(wide, name=name, prescale=prescale, postscale=postscale)
            return [tf.cast(total, tensors[0].dtype) for total in sums]
        outputs = mpi_ops._grouped_allreduce(
            [guarded(tensor) for tensor in tensors],
            name=name,
            op=hvd.Sum,
            prescale_factor=prescale,
            postscale_factor=postscale,
            ignore_name_scope=True,
            process_set=self._process_set,
        )
        return list(kept(outputs, name))

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate the ranks' tensors along dim 0, where their sizes may differ."""
        if tensor.dtype == tf.bfloat16:
            return tf.bitcast(self.all_gather(tf.bitcast(tensor, tf.uint16), name=name), tf.bfloat16)
        return kept(
            mpi_ops.allgather(guarded(tensor), name=name, ignore_name_scope=True, process_set=self._process_set), name
        )

    def reduce_scatter(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Sum `tensor` over the axis and return this rank's slice along dim 0; of n rows over r ranks the first n mod r
        get one more.
        """
        output = mpi_ops._reducescatter(
            guarded(tensor), name=name, op=hvd.Sum, ignore_name_scope=True, process_set=self._process_set
        )
        return kept(output, name)

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Cut `tensor` into equal parts along dim 0, send part i to rank i, and line up what came, by rank.

        Dim 0 must be the same multiple of the axis' size on all ranks; the result has the shape of `tensor`.
        """
        output = mpi_ops.alltoall(guarded(tensor), name=name, ignore_name_scope=True, process_set=self._process_set)
        return tf.ensure_shape(kept(output, name), tensor.shape)

    def broadcast(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Return `root`'s tensor on every rank; dtypes that Horovod does not move travel as bits."""
        if tensor.dtype == tf.bfloat16:
            bits = self.broadcast(tf.bitcast(tensor, tf.uint16), root=root, name=name)
            return tf.bitcast(bits, tf.bfloat16)
        if tensor.dtype in (tf.uint32, tf.uint64):
            signed = tf.int32 if tensor.dtype == tf.uint32 else tf.int64
            bits = self.broadcast(tf.bitcast(tensor, signed), root=root, name=name)
            return tf.bitcast(bits, tensor.dtype)
        output = mpi_ops.broadcast(
            guarded(tensor), root, name=name, ignore_name_scope=True, process_set=self._process_set
        )
        return kept(output, name)
