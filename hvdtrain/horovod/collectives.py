"""Horovod's collectives, with its names and arguments.

Improvements over Horovod's own:

- within a compiled function they are neither merged nor constant-folded (`primitives.py`);
- they accept Keras variables, and anything else that converts to a tensor;
- bfloat16 travels as float32: moves are exact, reductions are rounded once, at the end;
- uint32 and uint64 are moved as signed integers, bit by bit; they cannot be reduced;
- a group may mix dtypes, and dense and sparse tensors;
- each row of a sparse result occurs once, summed over the ranks.

Their gradients are those that Horovod registers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from horovod.tensorflow import mpi_ops

from hvdtrain.compat.tensorflow import is_resource_variable
from hvdtrain.gradients.sparse import sum_duplicates
from hvdtrain.horovod import primitives
from hvdtrain.horovod.basics import (
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
from hvdtrain.horovod.exchange import check_exists, size_of
from hvdtrain.horovod.primitives import Call, Reduce, all_gather, all_reduce, reduce_scatter
from hvdtrain.state.variables import as_written, unwrap

_Change = Callable[[tf.Tensor], tf.Tensor]
_AS_SIGNED = {tf.uint32: tf.int32, tf.uint64: tf.int64}


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

    Shape and dtype must agree on all ranks. `average` is the deprecated form of `op`.
    """
    op = handle_average_backwards_compatibility(op, average)
    _check_op(op, process_set)
    if isinstance(tensor, tf.IndexedSlices):
        _check_sparse(op, prescale_factor, postscale_factor)
        with tf.device(device_sparse):
            return _rows(tensor, op=op, name=name, process_set=process_set, ignore_scope=ignore_name_scope)

    how, call = Reduce(op, prescale_factor, postscale_factor), Call(name, ignore_name_scope, process_set)
    with tf.device(device_dense):
        return _compressed([tensor], compression, lambda packed: _each_dtype(packed, all_reduce, how, call))[0]


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
    _check_op(op, process_set)
    results = list(tensors)
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i in range(len(tensors)) if i not in sparse]

    how, call = Reduce(op, prescale_factor, postscale_factor), Call(name, ignore_name_scope, process_set)
    with tf.device(device_sparse):
        for i in sparse:
            _check_sparse(op, prescale_factor, postscale_factor)
            results[i] = _rows(
                tensors[i], op=op, name=name and f"{name}_{i}", process_set=process_set, ignore_scope=ignore_name_scope
            )
    with tf.device(device_dense):
        reduced = _compressed(
            [tensors[i] for i in dense], compression, lambda packed: _each_dtype(packed, all_reduce, how, call)
        )
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
    call = Call(name, ignore_name_scope, process_set)
    return _each_dtype([tf.convert_to_tensor(tensor) for tensor in tensors], all_gather, call, moves=True)


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Return the tensor of `root_rank` (a global rank, even in a process set) on every rank."""
    whole = tf.convert_to_tensor(tensor)
    there, back = _stand_in(whole.dtype, moves=True)
    return back(primitives.broadcast(there(whole), root_rank, Call(name, ignore_name_scope, process_set)))


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
        return mpi_ops.broadcast_(tensors, root_rank, name, process_set)
    sent = mpi_ops.MPI_LIB.horovod_broadcast_inplace_resource(
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
    whole = tf.convert_to_tensor(tensor)
    there, back = _stand_in(whole.dtype, moves=True)
    # Empty splits mean equal numbers of rows.
    parts = tf.cast(tf.convert_to_tensor([] if splits is None else splits), tf.int32)
    output, received = primitives.all_to_all(there(whole), parts, Call(name, ignore_name_scope, process_set))
    return back(output) if splits is None else (back(output), received)


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
    how, call = Reduce(op, prescale_factor, postscale_factor), Call(name, ignore_name_scope, process_set)
    with tf.device(device_dense):
        return _compressed([tensor], compression, lambda packed: _each_dtype(packed, reduce_scatter, how, call))[0]


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
    if not tensors:
        return tensors
    how, call = Reduce(op, prescale_factor, postscale_factor), Call(process_set=process_set)
    with tf.device(device_dense):
        return _compressed(tensors, compression, lambda packed: _each_dtype(packed, reduce_scatter, how, call))


def _check_op(op: int, process_set: Any) -> None:
    """Refuse a process set that does not exist, and an Adasum that would hang or fail inside Horovod."""
    check_exists(process_set)
    process_set.size()  # raises for an id that Horovod does not know
    if op != Adasum:
        return
    if process_set.process_set_id != global_process_set.process_set_id:
        raise NotImplementedError("Adasum does not support non-global process sets yet.")
    if not check_num_rank_power_of_2(size()):
        raise NotImplementedError("Running Adasum with non-power of 2 ranks is not supported yet.")
    if not mpi_enabled():
        raise NotImplementedError("Adasum needs MPI: start with mpirun, or horovodrun --mpi.")


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


def _rows(slices: tf.IndexedSlices, op: int, name: str | None, process_set: Any, ignore_scope: bool) -> Any:
    values = allgather(slices.values, name and f"{name}_values", ignore_scope, process_set)
    indices = allgather(slices.indices, name and f"{name}_indices", ignore_scope, process_set)
    if op == Average:  # before duplicates are added: small integers would overflow
        values = _as_float(values)
        values /= tf.cast(size_of(process_set), values.dtype)
    return sum_duplicates(tf.IndexedSlices(values, indices, slices.dense_shape))


def _as_float(tensor: tf.Tensor) -> tf.Tensor:
    """Return integers as the floats that TensorFlow divides them in, as Horovod does; floats keep their dtype."""
    return tensor if tensor.dtype.is_floating else tf.truediv(tensor, tf.ones((), tensor.dtype))


def _compressed(tensors: Sequence[Any], compression: Any, reduce: Callable[[list[Any]], list[Any]]) -> list[Any]:
    """Compress `tensors`, reduce them, and decompress the result."""
    pairs = [compression.compress(tf.convert_to_tensor(tensor)) for tensor in tensors]
    reduced = reduce([packed for packed, _ in pairs])
    return [compression.decompress(tensor, context) for tensor, (_, context) in zip(reduced, pairs, strict=True)]


def _stand_in(
    dtype: tf.DType, moves: bool
) -> tuple[Callable[[tf.Tensor], tf.Tensor], Callable[[tf.Tensor], tf.Tensor]]:
    """Return functions from `dtype` to a dtype that Horovod supports and back, for moves or else for reductions."""
    if dtype == tf.bfloat16:
        return lambda tensor: tf.cast(tensor, tf.float32), lambda tensor: tf.cast(tensor, tf.bfloat16)
    if moves and dtype in _AS_SIGNED:
        return lambda tensor: tf.bitcast(tensor, _AS_SIGNED[dtype]), lambda tensor: tf.bitcast(tensor, dtype)
    return lambda tensor: tensor, lambda tensor: tensor


def _each_dtype(
    tensors: Sequence[tf.Tensor], function: Callable[..., list[tf.Tensor]], *options: Any, moves: bool = False
) -> list[Any]:
    """Call `function` once per dtype among `tensors`, preserving order; the last of `options` is the `Call`."""
    *how, call = options
    results: list[Any] = list(tensors)
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    for dtype in dtypes:
        there, back = _stand_in(dtype, moves)
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        own = call if len(dtypes) == 1 else call.child(dtype.name)
        outputs = function([there(tensors[i]) for i in places], *how, own)
        for i, output in zip(places, outputs, strict=True):
            results[i] = back(output)
    return results
