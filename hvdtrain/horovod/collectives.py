"""Horovod's collectives, with its names and arguments.

They are those of `hvdtrain.gradients.collectives`, and take what these take: Keras variables, groups of several dtypes,
and rows. Their gradients are those that Horovod registers, which differ from those of `hvdtrain.allgather` and the like
by a factor: 1 / ranks for gathers and broadcasts, and the number of ranks for reduce-scatters.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops as _horovods

from hvdtrain.compat.tensorflow import is_resource_variable
from hvdtrain.gradients import collectives as shared
from hvdtrain.horovod.names import (
    Adasum,
    Average,
    Compression,
    Sum,
    check_num_rank_power_of_2,
    global_process_set,
    handle_average_backwards_compatibility,
    mpi_enabled,
    size,
)
from hvdtrain.runtime.process_sets import (
    check_exists,
    collectives_among,
    is_elastic,
    is_global,
    one_over_size,
    size_of,
)
from hvdtrain.state.variables import as_written, unwrap

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor, or tf.IndexedSlices, elementwise over the ranks of `process_set`; the average by default.

    Shape and dtype must agree on all ranks. `average` is the deprecated form of `op`. Name scopes are never part of the
    name by which ranks match their calls, so that `ignore_name_scope` has no effect.
    """
    options = {**locals()}
    return grouped_allreduce([options.pop("tensor")], **options)[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> Any:
    """Reduce tensors and tf.IndexedSlices; dense ones of a dtype are sent together."""
    if not tensors:
        return tensors
    op = handle_average_backwards_compatibility(op, average)
    group = _group(process_set, op)
    called, averages = shared.call_name("allreduce", name, process_set), op == Average
    results = list(tensors)
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]
    with tf.device(device_sparse):
        for i in sparse:
            _check_sparse(op, prescale_factor, postscale_factor)
            divisor = size_of(process_set) if averages else None
            results[i] = shared.reduce_rows(tensors[i], group, name=f"{called}/rows{i}", divisor=divisor)

    def reduce(own: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        # In an elastic job a compiled function may outlive the number of ranks.
        divides = averages and is_elastic()
        kind = "sum" if divides else shared.op_name(op)
        sums = shared.all_reduce(own, group, name=name, op=kind, prescale=prescale_factor, postscale=postscale_factor)
        return [_divided(total, process_set) for total in sums] if divides else sums

    with tf.device(device_dense):
        reduced = _compressed([tensors[i] for i in dense], compression, reduce, called)
    for i, result in zip(dense, reduced, strict=True):
        results[i] = result
    return results


@as_written
def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: Any = global_process_set
) -> Any:
    """Concatenate the ranks' tensors along dim 0, where their sizes may differ."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> list[Any]:
    """Gather several tensors; those of a dtype are sent together."""
    group = _group(process_set)
    whole = [_averaging_backward(tf.convert_to_tensor(tensor), process_set) for tensor in tensors]
    return shared.each_dtype(
        whole, lambda own, name: shared.gather(own, group, name=name), shared.call_name("allgather", name, process_set)
    )


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Return the tensor of `root_rank` (a global rank, even in a process set) on every rank."""
    whole = _averaging_backward(tf.convert_to_tensor(tensor), process_set)
    return shared.broadcast(whole, root_rank, name=name, process_set=process_set)


@as_written
def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Overwrite `variables`, all on one device, with the values of `root_rank`, and return their new values.

    Variables are matched by position in the list, as names may repeat; reference variables of TensorFlow 1 by name.
    """
    check_exists(process_set)
    tensors = [unwrap(variable) for variable in variables]
    if not all(is_resource_variable(tensor) for tensor in tensors):
        return _horovods.broadcast_(tensors, root_rank, name, process_set)
    sent = _horovods.MPI_LIB.horovod_broadcast_inplace_resource(
        [tensor.handle for tensor in tensors],
        variable_names=[f"variable{place}" for place in range(len(tensors))],
        name=name,
        root_rank=root_rank,
        process_set_id=process_set.process_set_id,
    )
    with tf.control_dependencies([] if tf.executing_eagerly() else [sent]):
        return [tensor.read_value() for tensor in tensors]


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Send `splits[i]` rows (equal numbers if None) to rank i, and concatenate the rows received, by rank.

    With `splits`, also return the number of rows received from each rank.
    """
    return shared.alltoall(tensor, splits, name=name, process_set=process_set)


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor over the ranks and scatter it along dim 0; the first ranks get the remainder."""
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _scattered([tensor], device_dense, compression, op, process_set, name, **factors)[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: int = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce and scatter several tensors; those of a dtype are sent together."""
    factors = {"prescale": prescale_factor, "postscale": postscale_factor}
    return _scattered(tensors, device_dense, compression, op, process_set, None, **factors)


def _scattered(
    tensors: Sequence[Any],
    device: str,
    compression: Any,
    op: int,
    process_set: Any,
    name: str | None,
    *,
    prescale: float,
    postscale: float,
) -> Any:
    if not tensors:
        return tensors
    if op not in (Average, Sum):
        raise ValueError("op currently only supports Average and Sum")
    group, divides = _group(process_set), op == Average and is_elastic()
    after = postscale if op == Sum or divides else postscale / group.size

    def scatter(own: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        rows = [_without_rows(_averaging_backward(x, process_set, inverse=True)) for x in own]
        shards = shared.reduce_scatter(rows, group, name=name, prescale=prescale, postscale=after)
        return [_divided(shard, process_set) for shard in shards] if divides else shards

    with tf.device(device):
        return _compressed(tensors, compression, scatter, shared.call_name("reducescatter", name, process_set))


def _group(process_set: Any, op: int = Sum) -> Any:
    """Return the collectives of a process set, and refuse an Adasum that would hang or fail inside Horovod."""
    group = collectives_among(process_set)
    if op == Adasum and not is_global(process_set):
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if op == Adasum and not check_num_rank_power_of_2(size()):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    if op == Adasum and not mpi_enabled():
        raise NotImplementedError("Adasum needs MPI: start with mpirun, or horovodrun --mpi.")
    return group


def _check_sparse(op: int, prescale: float, postscale: float) -> None:
    if op == Adasum:
        raise NotImplementedError(
            "The Adasum reduction does not currently support sparse tensors. As a workaround please pass "
            "sparse_as_dense=True to DistributedOptimizer"
        )
    if op not in (Sum, Average):
        raise NotImplementedError("Only Sum and Average ops are supported with tf.IndexedSlices")
    if prescale != 1.0 or postscale != 1.0:
        raise NotImplementedError("Pre/postscale_factor are not supported with tf.IndexedSlices")


def _compressed(
    tensors: Sequence[Any], compression: Any, reduce: Callable[[list[tf.Tensor], str], list[tf.Tensor]], name: str
) -> list[Any]:
    """Compress `tensors`, reduce those of each dtype, and decompress the results."""
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    reduced = shared.each_dtype([packed for packed, _ in pairs], reduce, name)
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def _divided(total: tf.Tensor, process_set: Any) -> tf.Tensor:
    """Divide a sum by the number of ranks at run time."""
    if total.dtype.is_floating:
        return total * tf.cast(one_over_size(process_set), total.dtype)
    return tf.cast(tf.cast(total, tf.float64) * one_over_size(process_set), total.dtype)


def _without_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Return `tensor`, in a graph of an elastic job without a static number of rows, which its shards may not keep."""
    if not is_elastic() or tf.executing_eagerly():
        return tensor
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


def _averaging_backward(tensor: tf.Tensor, process_set: Any, *, inverse: bool = False) -> tf.Tensor:
    """Return `tensor`, whose gradient is divided by the number of ranks, or multiplied by it if `inverse`."""

    @tf.custom_gradient
    def passed(value: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tf.Tensor:
            gradient = tf.convert_to_tensor(upstream)
            count = tf.cast(size_of(process_set), gradient.dtype)
            return gradient * count if inverse else gradient / count

        return tf.identity(value), backward

    return passed(tensor)
