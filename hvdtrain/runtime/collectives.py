"""The only place that calls Horovod's collectives.

Horovod's data ops carry no state, so TensorFlow takes two with equal inputs for one, and one with a constant input for
a constant: its first result is kept, and the op never runs again. Where the input is constant on one rank only, the
others wait for it for ever. Three things keep each op what it is:

- an attribute of its own, by which the graph optimizer (Grappler) does not merge it with another;
- an input that passes through PlaceholderWithDefault, which Grappler does not fold;
- an empty `_scoped_allocator`, for which the runtime's own constant folding, which every function goes through when it
  is first called, leaves an op alone (`IsConstantFoldable` in tensorflow/core/common_runtime/constant_folding.cc).
"""

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import horovod.tensorflow as hvd
import tensorflow as tf
from horovod.tensorflow import mpi_ops
from tensorflow.core.framework import attr_value_pb2

from hvdtrain.config.errors import ConfigError

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


def _guarded(tensor: tf.Tensor) -> tf.Tensor:
    if tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=tensor.shape)


def _kept(output: Any, name: str) -> Any:
    if not tf.executing_eagerly():
        first = output[0] if isinstance(output, list | tuple) else output
        first.op._set_attr("_hvd_uid", attr_value_pb2.AttrValue(i=zlib.crc32(name.encode())))
        none = attr_value_pb2.AttrValue(list=attr_value_pb2.AttrValue.ListValue())
        first.op._set_attr("_scoped_allocator", none)
    return output


class Collectives:
    """Collectives among the ranks along one axis of the mesh."""

    def __init__(self, axis: str, rank: int, size: int) -> None:
        self.axis = axis
        self.rank = rank
        self.size = size

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
            _guarded(tensor),
            name=name,
            op=_OPS["sum" if op == "average" else op],
            prescale_factor=prescale,
            postscale_factor=postscale / self.size if op == "average" else postscale,
            ignore_name_scope=True,
        )
        return _kept(output, name)

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum each of `tensors` over the axis in one message per dtype; none leaves before all are there."""
        outputs = mpi_ops._grouped_allreduce(
            [_guarded(tensor) for tensor in tensors],
            name=name,
            op=hvd.Sum,
            prescale_factor=prescale,
            postscale_factor=postscale,
            ignore_name_scope=True,
        )
        return list(_kept(outputs, name))

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate the ranks' tensors along dim 0, where their sizes may differ."""
        if tensor.dtype == tf.bfloat16:
            return tf.bitcast(self.all_gather(tf.bitcast(tensor, tf.uint16), name=name), tf.bfloat16)
        return _kept(mpi_ops.allgather(_guarded(tensor), name=name, ignore_name_scope=True), name)

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Cut `tensor` into equal parts along dim 0, send part i to rank i, and line up what came, by rank.

        Dim 0 must be the same multiple of the axis' size on all ranks; the result has the shape of `tensor`.
        """
        output = mpi_ops.alltoall(_guarded(tensor), name=name, ignore_name_scope=True)
        return tf.ensure_shape(_kept(output, name), tensor.shape)

    def broadcast(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Return `root`'s tensor on every rank; dtypes that Horovod does not move travel as bits."""
        if tensor.dtype == tf.bfloat16:
            bits = self.broadcast(tf.bitcast(tensor, tf.uint16), root=root, name=name)
            return tf.bitcast(bits, tf.bfloat16)
        if tensor.dtype in (tf.uint32, tf.uint64):
            signed = tf.int32 if tensor.dtype == tf.uint32 else tf.int64
            bits = self.broadcast(tf.bitcast(tensor, signed), root=root, name=name)
            return tf.bitcast(bits, tensor.dtype)
        output = mpi_ops.broadcast(_guarded(tensor), root, name=name, ignore_name_scope=True)
        return _kept(output, name)
