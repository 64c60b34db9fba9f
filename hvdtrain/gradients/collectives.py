"""Differentiable collectives of a script's own tensors: `hvdtrain.allreduce`, `hvdtrain.all_gather` and the like.

The gradient of each is its adjoint, which is the gradient of the sum of all ranks' losses:

    sum, average     the same reduction of the upstream gradients
    gather           the sum over the ranks of the upstream gradients of this rank's rows
    broadcast        at the root the sum of the upstream gradients, elsewhere zero
    all-to-all       the upstream gradients sent back
    reduce-scatter   the upstream gradients gathered

Gradients have the dtype of the input: an upstream gradient may have another one, and its own on each rank. Collectives
of the backward pass are collectives of all ranks too, so every rank must differentiate its result.

The first half works on any `Collectives`, and is what `hvdtrain.horovod` calls; the second half is the public API.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, cast

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives, ReduceOp
from hvdtrain.backends.select import current_exchange
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.sparse import sum_duplicates
from hvdtrain.partition.kinds import Rows
from hvdtrain.partition.partition import partition_here
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import as_written

OPS = ("average", "sum", "adasum", "min", "max", "product")
"""Reductions; the place of each is the number by which Horovod knows it."""
Op: TypeAlias = Literal["average", "sum", "adasum", "min", "max", "product"] | int
"""A reduction by name, or one of Horovod's constants such as `hvd.Sum`."""
_UNREDUCED = (tf.bool, tf.int16, tf.uint16, tf.uint32, tf.uint64)
"""dtypes that Horovod gathers, and does not reduce."""
_UNMOVED = {
    tf.string: "hvdtrain.gather_object(x.numpy())",
    tf.complex64: "its tf.math.real and tf.math.imag",
    tf.complex128: "its tf.math.real and tf.math.imag",
}
"""dtypes that it does not exchange at all, and what to exchange instead."""
LINEAR = ("average", "sum")
"""Reductions that have a gradient, and that sparse tensors have."""


def op_name(op: Op | str) -> str:
    """Return the name of a reduction.

    Raises:
        ConfigError: an unknown one.
    """
    name = OPS[op] if isinstance(op, int) and 0 <= op < len(OPS) else op
    if name not in OPS:
        raise ConfigError(f"op must be one of {', '.join(OPS)}, or one of Horovod's constants. Received: {op!r}.")
    return name


def all_reduce(
    tensors: Sequence[tf.Tensor],
    group: Collectives,
    *,
    name: str,
    op: str = "sum",
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> list[tf.Tensor]:
    """Reduce tensors of one dtype elementwise over the replicas; sums and averages of several leave together."""
    factors = {"prescale": prescale, "postscale": postscale}

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> Any:
        def backward(*upstream: Any) -> list[tf.Tensor]:
            if op not in LINEAR:
                raise ConfigError(f"op={op!r} has no gradient. Use op='sum' or 'average', or tf.stop_gradient.")
            return all_reduce(_like(inputs, upstream), group, name=_back(name), op=op, **factors)

        if len(inputs) > 1 and op in LINEAR:
            after = postscale / group.size if op == "average" else postscale
            return group.grouped_all_reduce(inputs, name=name, prescale=prescale, postscale=after), backward
        names = [name] if len(inputs) == 1 else [f"{name}/{i}" for i in range(len(inputs))]
        each = zip(inputs, names, strict=True)
        return [group.all_reduce(x, name=n, op=cast(ReduceOp, op), **factors) for x, n in each], backward

    return list(reduced(*tensors))


def gather(tensors: Sequence[tf.Tensor], group: Collectives, *, name: str) -> list[tf.Tensor]:
    """Concatenate each of several tensors of one dtype along dim 0, in which the replicas' may differ."""

    @tf.custom_gradient
    def gathered(*inputs: tf.Tensor) -> Any:
        def backward(*upstream: Any) -> list[tf.Tensor]:
            back = _back(name)
            sums = all_reduce(_like(inputs, upstream), group, name=back)
            pairs = enumerate(zip(sums, inputs, strict=True))
            return [_own_rows(total, x, group, f"{back}/rows{i}") for i, (total, x) in pairs]

        if len(inputs) > 1:
            return group.grouped_all_gather(inputs, name=name), backward
        return [group.all_gather(inputs[0], name=name)], backward

    return list(gathered(*tensors))


def _own_rows(whole: tf.Tensor, mine: tf.Tensor, group: Collectives, name: str) -> tf.Tensor:
    """Slice this replica's rows, as many as `mine` has, from the rows of all."""
    with tf.device("/cpu:0"):
        rows = group.all_gather(tf.shape(mine)[:1], name=name)
    begin = tf.reduce_sum(rows[: group.index])
    return tf.ensure_shape(whole[begin : begin + rows[group.index]], mine.shape)


def send(tensor: tf.Tensor, group: Collectives, *, root: int, name: str) -> tf.Tensor:
    """Return the tensor of the replica at index `root`."""

    @tf.custom_gradient
    def sent(value: tf.Tensor) -> Any:
        def backward(upstream: Any) -> tf.Tensor:
            total = all_reduce(_like([value], [upstream]), group, name=_back(name))[0]
            # An op whose result nobody reads would be pruned, and the others would wait for it.
            return total if group.index == root else tf.math.multiply_no_nan(total, tf.zeros([], total.dtype))

        return group.broadcast_value(value, root=root, name=name), backward

    return sent(tensor)


def exchange_rows(tensor: tf.Tensor, rows: tf.Tensor, group: Collectives, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Send `rows[i]` rows, or equal parts if `rows` is empty, to replica i; return the rows received and their numbers.

    Args:
        tensor: of the same shape on all replicas but for dim 0.
        rows: int32 [replicas], or [0].
        group: the replicas.
        name: tells this exchange from every other.
    """

    @tf.custom_gradient
    def exchanged(value: tf.Tensor) -> Any:
        received, counts = group.exchange_rows(value, rows, name=name)

        def backward(upstream: Any, _: Any) -> tf.Tensor:
            return exchange_rows(_like([value], [upstream])[0], counts, group, name=_back(name))[0]

        return (received, counts), backward

    received, counts = exchanged(tensor)
    return received, counts


def reduce_scatter(
    tensors: Sequence[tf.Tensor], group: Collectives, *, name: str, prescale: float = 1.0, postscale: float = 1.0
) -> list[tf.Tensor]:
    """Sum tensors of one dtype over the replicas, each of which keeps its rows."""
    factors = {"prescale": prescale, "postscale": postscale}

    @tf.custom_gradient
    def reduced(*inputs: tf.Tensor) -> Any:
        def backward(*upstream: Any) -> list[tf.Tensor]:
            shards = [dy * tf.cast(prescale * postscale, dy.dtype) for dy in _like(inputs, upstream)]
            return gather(shards, group, name=_back(name))

        if len(inputs) > 1:
            return group.grouped_reduce_scatter(inputs, name=name, **factors), backward
        return [group.reduce_scatter(inputs[0], name=name, **factors)], backward

    return list(reduced(*tensors))


def reduce_rows(slices: tf.IndexedSlices, group: Collectives, *, name: str, divisor: Any = None) -> tf.IndexedSlices:
    """Return the rows of all replicas, each index once, with their sum divided by `divisor`."""
    values = gather([slices.values], group, name=f"{name}/values")[0]
    indices = group.all_gather(slices.indices, name=f"{name}/indices")
    if divisor is not None:  # before rows are added: small integers would overflow
        values = values if values.dtype.is_floating else tf.truediv(values, tf.ones((), values.dtype))
        values /= tf.cast(divisor, values.dtype)
    return sum_duplicates(tf.IndexedSlices(values, indices, slices.dense_shape))


def each_dtype(
    tensors: Sequence[tf.Tensor], function: Callable[[list[tf.Tensor], str], list[tf.Tensor]], name: str
) -> list[Any]:
    """Call `function` with the tensors of each dtype, under a name of its own; return the results in order."""
    results: list[Any] = list(tensors)
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in tensors))
    for dtype in dtypes:
        places = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
        own = name if len(dtypes) == 1 else f"{name}/{dtype.name}"
        for i, output in zip(places, function([tensors[i] for i in places], own), strict=True):
            results[i] = output
    return results


def _back(name: str) -> str:
    """Return the name of the backward pass, which may be traced several times."""
    return numbered(f"{name}/back")


def _like(inputs: Sequence[tf.Tensor], upstream: Sequence[Any]) -> list[tf.Tensor]:
    """Return the upstream gradients as dense tensors of the inputs' dtypes."""
    return [tf.cast(tf.convert_to_tensor(dy), x.dtype) for dy, x in zip(upstream, inputs, strict=True)]


@as_written
def allreduce(
    tensor: Any,
    op: Op = "average",
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
) -> Any:
    """Reduce a tensor elementwise over all ranks. Collective.

    Args:
        tensor: a tensor, a variable or a number, of the same shape and dtype on all ranks; or tf.IndexedSlices, whose
            rows are gathered, and those of one index summed.
        op: `average`, `sum`, `min`, `max`, `product` or `adasum`; of tf.IndexedSlices `average` or `sum`.
        prescale_factor: multiplies the input.
        postscale_factor: multiplies the result.
        name: by which ranks match their calls within a tf.function; None: their order.
        process_set: some of the ranks, as a process set of Horovod's; None: all ranks of the job.

    Returns:
        A tensor, or tf.IndexedSlices, of the same dtype; averages of sparse integers are floats.

    Raises:
        ConfigError: the session's backend cannot reduce here, or the op is not defined on `tensor`.

    Example::

        mean = hvdtrain.allreduce(tf.reduce_mean(model(x)))
        largest = hvdtrain.allreduce(tf.constant(float(hvdtrain.rank())), "max")
    """
    return grouped_allreduce(
        [tensor],
        op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
        process_set=process_set,
    )[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    op: Op = "average",
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
) -> list[Any]:
    """Reduce several tensors over all ranks; dense ones of one dtype leave together. Collective.

    Arguments are those of `allreduce`.

    Example::

        sums = hvdtrain.grouped_allreduce([tf.ones([2]), tf.ones([3, 3])], "sum")
    """
    group, called, reduction = _group(process_set), call_name("allreduce", name, process_set), op_name(op)
    results = [each if isinstance(each, tf.IndexedSlices) else _tensor(each, group, reduced=True) for each in tensors]
    dense = [i for i, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    for i in sorted(set(range(len(results))) - set(dense)):
        if reduction not in LINEAR or prescale_factor != 1.0 or postscale_factor != 1.0:
            raise ConfigError(
                f"tf.IndexedSlices have op='average' and 'sum', without factors. Received: op={reduction!r}. Convert "
                "them with tf.convert_to_tensor first."
            )
        divisor = group.size if reduction == "average" else None
        results[i] = reduce_rows(results[i], group, name=f"{called}/rows{i}", divisor=divisor)

    def reduce(own: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        return all_reduce(own, group, name=name, op=reduction, prescale=prescale_factor, postscale=postscale_factor)

    reduced = each_dtype([results[i] for i in dense], reduce, called)
    for i, result in zip(dense, reduced, strict=True):
        results[i] = result
    return results


@as_written
def all_gather(tensor: Any, axis: int = 0, *, name: str | None = None, process_set: Any = None) -> tf.Tensor:
    """Concatenate the ranks' tensors along `axis`, in which their sizes may differ. Collective.

    The gradient is the sum over all ranks of what each computed from this rank's part: that of a loss over the whole,
    such as a contrastive one, which every rank computes.

    Args:
        tensor: a tensor or a variable, of the same dtype on all ranks, and of the same shape but for `axis`.
        axis: the dim to concatenate along; negative from the last.
        name: see `allreduce`.
        process_set: see `allreduce`.

    Example::

        features = hvdtrain.all_gather(model(x))  # of all ranks' samples, with their gradients
    """
    partition = partition_here()
    if partition is not None and process_set is None and isinstance(partition.kind(tensor), Rows):
        partition.cause = "all_gather"
        return partition.whole(tensor)
    group = _group(process_set)
    whole = _tensor(tensor, group)
    dims = whole.shape.rank or 0
    if (axis and not -dims <= axis < dims) or whole.shape.rank == 0:
        raise ConfigError(f"axis must be a dim of the tensor. Received: axis={axis} and the shape {whole.shape}.")
    order = [axis % dims, *(i for i in range(dims) if i != axis % dims)] if axis else []
    first = tf.transpose(whole, order) if order else whole
    result = gather([first], group, name=call_name("all_gather", name, process_set))[0]
    return tf.transpose(result, [order.index(i) for i in range(dims)]) if order else result


@as_written
def allgather(tensor: Any, *, name: str | None = None, process_set: Any = None) -> tf.Tensor:
    """Concatenate the ranks' tensors along dim 0: Horovod's name for `all_gather`. Collective.

    Example::

        rows = hvdtrain.allgather(tf.ones([hvdtrain.rank() + 1, 2]))
    """
    return all_gather(tensor, name=name, process_set=process_set)


@as_written
def broadcast(tensor: Any, root_rank: int = 0, *, name: str | None = None, process_set: Any = None) -> tf.Tensor:
    """Return the tensor of rank `root_rank` on all ranks. Collective.

    Args:
        tensor: a tensor or a variable, of the same shape and dtype on all ranks.
        root_rank: a rank of the job, with `process_set` too.
        name: see `allreduce`.
        process_set: see `allreduce`.

    Example::

        first = hvdtrain.broadcast(tf.constant([float(hvdtrain.rank())]), root_rank=0)
    """
    group: Any = _group(process_set)
    ranks = range(group.size) if process_set is None else group.group.ranks
    if root_rank not in ranks:
        raise ConfigError(f"root_rank must be one of {', '.join(map(str, ranks))}. Received: {root_rank}.")
    called = call_name("broadcast", name, process_set)
    return send(_tensor(tensor, group), group, root=ranks.index(root_rank), name=called)


@as_written
def alltoall(tensor: Any, splits: Any = None, *, name: str | None = None, process_set: Any = None) -> Any:
    """Send consecutive rows to each rank, and concatenate the rows received, by rank. Collective.

    Args:
        tensor: a tensor or a variable, of the same dtype on all ranks, and of the same shape but for dim 0.
        splits: int [ranks]: how many rows go to each rank; None: equal parts.
        name: see `allreduce`.
        process_set: see `allreduce`.

    Returns:
        The rows; with `splits` also how many came from each rank, int32 [ranks].

    Example::

        rows, came = hvdtrain.alltoall(tf.ones([hvdtrain.size(), 4]), splits=[1] * hvdtrain.size())
    """
    rows = tf.cast(tf.convert_to_tensor([] if splits is None else splits), tf.int32)
    called = call_name("alltoall", name, process_set)
    group = _group(process_set)
    received, counts = exchange_rows(_tensor(tensor, group), rows, group, name=called)
    return received if splits is None else (received, counts)


@as_written
def reducescatter(
    tensor: Any,
    op: Op = "average",
    *,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = None,
) -> tf.Tensor:
    """Reduce a tensor over all ranks, and return this rank's consecutive rows of it. Collective.

    Where the rows do not divide among the ranks, the first ranks get one more. Arguments are those of `allreduce`; `op`
    is `average` or `sum`.

    Example::

        mine = hvdtrain.reducescatter(tf.ones([2 * hvdtrain.size(), 4]), "sum")
    """
    group, reduction = _group(process_set), op_name(op)
    if reduction not in LINEAR:
        raise ConfigError(f"reducescatter has op='average' and 'sum'. Received: {op!r}.")
    after = postscale_factor / group.size if reduction == "average" else postscale_factor
    called = call_name("reducescatter", name, process_set)
    tensors = [_tensor(tensor, group, reduced=True)]
    return reduce_scatter(tensors, group, name=called, prescale=prescale_factor, postscale=after)[0]


def _tensor(value: Any, group: Collectives, *, reduced: bool = False) -> tf.Tensor:
    """Return a value as a tensor. Raises ConfigError for a dtype that Horovod does not exchange, or reduce."""
    tensor = tf.convert_to_tensor(value)
    if group.size > 1 and (tensor.dtype in _UNMOVED or (reduced and tensor.dtype in _UNREDUCED)):
        raise ConfigError(
            f"Horovod does not {'reduce' if reduced else 'exchange'} {tensor.dtype.name}: instead of x take "
            f"{_UNMOVED.get(tensor.dtype, 'tf.cast(x, tf.int32)')}."
        )
    return tensor


def _group(process_set: Any) -> Collectives:
    """Return the collectives of a process set, or of all ranks of the session."""
    if process_set is None:
        return current_exchange().everyone
    from hvdtrain.runtime.process_sets import collectives_among  # Horovod is imported where it is used

    return collectives_among(process_set)


def call_name(kind: str, name: str | None, process_set: Any) -> str:
    """Return the name by which ranks match a call, numbered where it is used again in one function.

    By process set, since ranks of one make calls that others do not.
    """
    prefix = f"set{process_set.process_set_id}/" if process_set is not None and process_set.process_set_id else ""
    return numbered(f"{prefix}{kind}/{name or 'call'}")
