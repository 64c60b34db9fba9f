"""Horovod's ops, made safe inside compiled functions, with the gradients that Horovod registers.

Horovod's registered gradients name an op after its input. If that is a captured tensor, its name is a number that
differs by rank, and the ranks deadlock. Here the input of every op, also in the backward pass, is created in the
function.

Gradients, for the upstream gradients g of the ranks:

    allreduce        the same allreduce of g
    allgather        this rank's slice of the average of g
    broadcast        at the root the average of g, elsewhere zero
    alltoall         the slices of g sent back
    reducescatter    all shards of g, times the number of ranks for Sum

They have the dtype of the input: an upstream gradient may have another one, and its own on each rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.compat import horovod as ops
from hvdtrain.horovod.basics import Average, Sum, global_process_set, rank
from hvdtrain.horovod.exchange import check_exists
from hvdtrain.runtime.guarded import guarded, kept


@dataclass(frozen=True)
class Call:
    """Common arguments of all ops: name, whether name scopes are part of it, and process set."""

    name: str | None = None
    ignore_name_scope: bool = False
    process_set: Any = global_process_set

    def __post_init__(self) -> None:
        check_exists(self.process_set)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of Horovod's functions."""
        return {
            "name": self.name,
            "ignore_name_scope": self.ignore_name_scope,
            "process_set": self.process_set,
        }

    def child(self, what: str) -> "Call":
        """Return the call of a helper op, under a derived name."""
        return Call(self.name and f"{self.name}_{what}", self.ignore_name_scope, self.process_set)


@dataclass(frozen=True)
class Reduce:
    """The reduction op, with its prescale and postscale factors."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of Horovod's functions."""
        return {"op": self.op, "prescale_factor": self.prescale, "postscale_factor": self.postscale}


def all_reduce(tensors: Sequence[tf.Tensor], how: Reduce, call: Call) -> list[tf.Tensor]:
    """Reduce tensors of one dtype as a group."""

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> Any:
        safe = [guarded(tensor) for tensor in inputs]
        if len(safe) == 1:
            outputs = [ops.all_reduce(safe[0], **how.options, **call.options)]
        else:
            outputs = ops.grouped_all_reduce(safe, **how.options, **call.options)
        return list(kept(outputs)), lambda *upstream: all_reduce(_like(safe, upstream), how, call.child("gradient"))

    return list(reduced(*tensors))


def all_gather(tensors: Sequence[tf.Tensor], call: Call) -> list[tf.Tensor]:
    """Concatenate each of several tensors of one dtype along dim 0."""

    @tf.custom_gradient
    def gathered(*inputs: tf.Tensor) -> Any:
        safe = [guarded(tensor) for tensor in inputs]
        if len(safe) == 1:
            outputs = [mpi_ops.allgather(safe[0], **call.options)]
        else:
            outputs = mpi_ops.grouped_allgather(safe, **call.options)

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            averages = all_reduce(_like(safe, upstream), Reduce(Average), call.child("gradient"))
            return [
                _own_rows(g, x, call.child(f"rows{i}")) for i, (g, x) in enumerate(zip(averages, safe, strict=True))
            ]

        return list(kept(outputs)), backward

    return list(gathered(*tensors))


def _own_rows(whole: tf.Tensor, mine: tf.Tensor, call: Call) -> tf.Tensor:
    """Slice this rank's rows, as many as `mine` has, from the rows of all ranks."""
    with tf.device("/cpu:0"):
        rows = kept(mpi_ops.allgather(guarded(tf.shape(mine)[:1]), **call.options))
    me = rank() if call.process_set is global_process_set else call.process_set.rank()
    begin = tf.reduce_sum(rows[:me])
    return whole[begin : begin + rows[me]]


def broadcast(tensor: tf.Tensor, root_rank: int, call: Call) -> tf.Tensor:
    """Return the tensor of `root_rank`."""

    @tf.custom_gradient
    def sent(value: tf.Tensor) -> Any:
        def backward(upstream: tf.Tensor) -> tf.Tensor:
            average = all_reduce(_like([value], [upstream]), Reduce(Average), call.child("gradient"))[0]
            return average if rank() == root_rank else average * 0

        return kept(mpi_ops.broadcast(guarded(value), root_rank, **call.options)), backward

    return sent(tensor)


def all_to_all(tensor: tf.Tensor, splits: Any, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
    """Send `splits[i]` rows to rank i; return the received rows, and their number from each rank."""

    @tf.custom_gradient
    def exchanged(value: tf.Tensor) -> Any:
        output, received = mpi_ops.alltoall(guarded(value), splits=splits, **call.options)

        def backward(upstream: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return all_to_all(_like([value], [upstream])[0], received, call.child("gradient"))[0]

        return (kept(output), received), backward

    output, received = exchanged(tensor)
    return output, received


def reduce_scatter(tensors: Sequence[tf.Tensor], how: Reduce, call: Call) -> list[tf.Tensor]:
    """Reduce tensors of one dtype and return this rank's shards along dim 0."""

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> Any:
        safe = [guarded(tensor) for tensor in inputs]
        if len(safe) == 1:
            outputs = [ops.reduce_scatter(safe[0], **how.options, **call.options)]
        else:
            outputs = ops.grouped_reduce_scatter(safe, **how.options, **call.options)

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            times = how.prescale * how.postscale * (call.process_set.size() if how.op == Sum else 1)
            shards = [g * tf.cast(times, g.dtype) for g in _like(safe, upstream)]
            return all_gather(shards, call.child("gradient"))

        return list(kept(outputs)), backward

    return list(reduced(*tensors))


def _like(inputs: Sequence[tf.Tensor], upstream: Sequence[Any]) -> list[tf.Tensor]:
    """Return the upstream gradients as dense tensors of the inputs' dtypes."""
    return [tf.cast(tf.convert_to_tensor(g), x.dtype) for g, x in zip(upstream, inputs, strict=True)]
