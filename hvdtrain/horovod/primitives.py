"""Horovod's operations, kept what they are within compiled functions, with the gradients that Horovod registers.

Its registered gradients name an op after its input, which may be a tensor that a function has captured: its name is a
number that differs from rank to rank, and the ranks wait for one another for ever. Here the input of every op, in the
backward pass too, is one of the function's own.

Gradients, of the upstream gradients g that the ranks have:

    allreduce        the same allreduce of g
    allgather        this rank's part of the average of g
    broadcast        at the root the average of g, elsewhere zero
    alltoall         the parts of g sent back
    reducescatter    all parts of g, times the ranks for Sum
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.horovod.basics import Average, Sum, global_process_set, rank
from hvdtrain.runtime.guarded import guarded, kept


@dataclass(frozen=True)
class Call:
    """What all operations are told: their name, whether name scopes are part of it, and who takes part."""

    name: str | None = None
    ignore_name_scope: bool = False
    process_set: Any = global_process_set

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of Horovod's functions."""
        return {
            "name": self.name,
            "ignore_name_scope": self.ignore_name_scope,
            "process_set": self.process_set,
        }

    def part(self, what: str) -> "Call":
        """Return the call of an operation that belongs to this one."""
        return Call(self.name and f"{self.name}_{what}", self.ignore_name_scope, self.process_set)


@dataclass(frozen=True)
class Reduce:
    """How elements are reduced, and what multiplies them before and after."""

    op: int
    prescale: float = 1.0
    postscale: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of Horovod's functions."""
        return {"op": self.op, "prescale_factor": self.prescale, "postscale_factor": self.postscale}


def all_reduce(tensors: Sequence[tf.Tensor], how: Reduce, call: Call) -> list[tf.Tensor]:
    """Reduce tensors of one dtype, several of them together."""

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> Any:
        safe = [guarded(tensor) for tensor in inputs]
        if len(safe) == 1:
            outputs = [mpi_ops._allreduce(safe[0], **how.options, **call.options)]
        else:
            outputs = mpi_ops._grouped_allreduce(safe, **how.options, **call.options)
        return list(kept(outputs)), lambda *upstream: all_reduce(upstream, how, call.part("gradient"))

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
            averages = all_reduce(upstream, Reduce(Average), call.part("gradient"))
            return [_own_part(g, x, call.part(f"rows{i}")) for i, (g, x) in enumerate(zip(averages, safe, strict=True))]

        return list(kept(outputs)), backward

    return list(gathered(*tensors))


def _own_part(whole: tf.Tensor, mine: tf.Tensor, call: Call) -> tf.Tensor:
    """Cut this rank's rows, as many as `mine` has, from what all ranks have."""
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
            average = all_reduce([upstream], Reduce(Average), call.part("gradient"))[0]
            return average if rank() == root_rank else average * 0

        return kept(mpi_ops.broadcast(guarded(value), root_rank, **call.options)), backward

    return sent(tensor)


def all_to_all(tensor: tf.Tensor, splits: Any, call: Call) -> tuple[tf.Tensor, tf.Tensor]:
    """Send `splits[i]` rows to rank i; return what came, and how many rows from each rank."""

    @tf.custom_gradient
    def exchanged(value: tf.Tensor) -> Any:
        output, received = mpi_ops.alltoall(guarded(value), splits=splits, **call.options)

        def backward(upstream: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return all_to_all(upstream, received, call.part("gradient"))[0]

        return (kept(output), received), backward

    output, received = exchanged(tensor)
    return output, received


def reduce_scatter(tensors: Sequence[tf.Tensor], how: Reduce, call: Call) -> list[tf.Tensor]:
    """Reduce tensors of one dtype and return this rank's parts of dim 0."""

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> Any:
        safe = [guarded(tensor) for tensor in inputs]
        if len(safe) == 1:
            outputs = [mpi_ops._reducescatter(safe[0], **how.options, **call.options)]
        else:
            outputs = mpi_ops._grouped_reducescatter(safe, **how.options, **call.options)

        def backward(*upstream: tf.Tensor) -> list[tf.Tensor]:
            times = how.prescale * how.postscale * (call.process_set.size() if how.op == Sum else 1)
            return all_gather([g * tf.cast(times, g.dtype) for g in upstream], call.part("gradient"))

        return list(kept(outputs)), backward

    return list(reduced(*tensors))
