"""Rules of shapes, and of operations that move, merge or repeat dims."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.partition.kinds import Count, Opaque, Part, Rows, Sizes, times
from hvdtrain.partition.partition import Partition, spelled
from hvdtrain.partition.rules import Call, Made, Outputs, linear_parts, opaque, whole
from hvdtrain.partition.sizes import product, shape_of, static, values_of

# Shapes


def shape(call: Call) -> "Made | Outputs":
    """Make the true shapes."""
    p = call.partition
    dtype = tf.as_dtype(call.attrs["out_type"].type)
    made = []
    for each in call.inputs:
        kind = p.kind(each)
        if isinstance(kind, Opaque):
            return opaque(call)
        with p.plain():
            value = p.true_shape(each, kind, dtype) if isinstance(kind, Rows) else tf.shape(each, out_type=dtype)
        made.append(value)
    return Outputs(made, [shape_of(p, each) for each in call.inputs])


def size(call: Call) -> "Made | Outputs":
    """Make the true number of elements."""
    p, kind = call.partition, call.kinds[0]
    if not isinstance(kind, Rows):
        return call.inputs, []
    tensor = call.inputs[0]
    dtype = tf.as_dtype(call.attrs["out_type"].type)
    found = shape_of(p, tensor)
    assert found is not None

    def read(dim: int) -> tf.Tensor:
        with p.plain():
            return tf.shape(tensor)[dim]

    counted = product(found.entries, read)
    with p.plain():
        value = tf.reduce_prod(p.true_shape(tensor, kind, dtype))
    return Outputs([value], [Sizes((counted,), scalar=True)])


def reshape(call: Call) -> Made:
    """Reshape: rows stay rows where a dim of the result counts those of each sample."""
    p, kind = call.partition, call.kinds[0]
    tensor, target = call.inputs[0], p.whole(call.inputs[1])
    wanted = values_of(p, target)
    if not isinstance(kind, Rows) or tensor.shape.rank is None or wanted is None or wanted.scalar:
        return whole(call)
    found = _rows_after(p, tensor, kind, wanted=wanted, target=target)
    if found is None:
        return whole(call)
    with p.plain():
        entries = spelled(target, wanted)
        entries[found.dim] = tf.cast(p.local_length(found.per), target.dtype)
        if -1 in wanted.entries and wanted.entries[found.dim] != -1:
            # Of no rows, TensorFlow could not tell what -1 stands for: it is computed of one sample.
            place = wanted.entries.index(-1)
            others = [each for index, each in enumerate(entries) if index not in (place, found.dim)]
            known = tf.reduce_prod(tf.cast(tf.stack([1, *others]), tf.int32)) * sum(found.per)
            left = _known_rest(tensor, kind, wanted=wanted, found=found, place=place)
            entries[place] = tf.cast(_elements(tensor, kind) // known if left is None else left, target.dtype)
        return [tensor, tf.stack(entries)], [found]


def _known_rest(tensor: tf.Tensor, kind: Rows, *, wanted: Sizes, found: Rows, place: int) -> int | None:
    """Return what -1 at `place` stands for, if it is known before the step runs."""
    own = product([*tensor.shape.as_list()[: kind.dim], *tensor.shape.as_list()[kind.dim + 1 :], *kind.per[:1]])
    others = [each for index, each in enumerate(wanted.entries) if index not in (place, found.dim)]
    new = product([*others, *found.per[:1]]) if len(kind.per) == 1 else None
    return own // new if isinstance(own, int) and isinstance(new, int) and new else None


def _elements(tensor: tf.Tensor, kind: Rows) -> tf.Tensor:
    """Return the number of a tensor's elements that belong to one sample."""
    shape = tf.shape(tensor)
    return tf.reduce_prod(shape[: kind.dim]) * tf.reduce_prod(shape[kind.dim + 1 :]) * sum(kind.per)


def _rows_after(p: Partition, tensor: tf.Tensor, kind: Rows, *, wanted: Sizes, target: tf.Tensor) -> Rows | None:
    """Return where a reshaped tensor has its rows; None: samples would not stay apart, or it is not known."""
    before, behind = tensor.shape.as_list()[: kind.dim], tensor.shape.as_list()[kind.dim + 1 :]
    entries = wanted.entries
    if len(wanted.counts) > 1:
        return None
    copies = len(kind.per)
    if copies > 1 and wanted.counts == [1] and kind.dim == 0 and entries[0] == copies and len(set(kind.per)) == 1:
        return Rows(1, kind.per[:1])  # copies of a batch, each by itself
    if wanted.counts:
        dim = wanted.counts[0]
    elif all(each == 1 for each in before):
        dim = next((index for index, each in enumerate(entries) if each != 1), -1)
    else:
        dim = kind.dim if len(entries) > kind.dim else -1
    if dim < 0 or not _is_left_alone(before, entries[:dim]):
        return None
    entry = entries[dim]
    if isinstance(entry, Count):
        return Rows(dim, entry.per)
    if entry == -1:
        per = _times_behind(p, tensor, kind, behind=behind, tail=entries[dim + 1 :], target=target[dim + 1 :])
        return None if per is None else Rows(dim, per)
    length = p.length(kind.per)
    if not (isinstance(entry, int) and isinstance(length, int) and len(kind.per) == 1):
        return None
    merged = {length}
    for each in behind:
        if each is None:
            break
        merged.add(max(merged) * each)
    return Rows(dim, (entry // p.total,)) if entry in merged else None


def _is_left_alone(before: Sequence[int | None], entries: Sequence[Any]) -> bool:
    """Return whether what lies before the rows lies before them after a reshape, too."""
    if product(before) is not None and product(before) == product(entries) and -1 not in entries:
        return True
    return len(before) == len(entries) and all(
        one == other or (one is None and other is None) for one, other in zip(before, entries, strict=True)
    )


def _times_behind(
    p: Partition, tensor: tf.Tensor, kind: Rows, *, behind: Sequence[int | None], tail: Sequence[Any], target: tf.Tensor
) -> tuple[Any, ...] | None:
    """Return the rows of a sample once dims `behind` the rows became `tail`, which has fewer elements."""
    if any(isinstance(each, Count) for each in tail):
        return None
    open_behind, open_tail = behind.count(None), list(tail).count(None)
    one, other = (product([each for each in sizes if each is not None]) for sizes in (behind, tail))
    if not isinstance(one, int) or not isinstance(other, int) or not other or open_behind < open_tail:
        return None
    if open_behind == open_tail and all(isinstance(each, int) for each in kind.per):
        counts = [divmod(each * one, other) for each in kind.per]
        return None if any(rest for _, rest in counts) else tuple(each for each, _ in counts)
    if open_behind == open_tail and not one % other:
        return times(kind.per, one // other)
    if open_behind > open_tail and one % other:
        return None
    with p.plain():
        own = tf.reduce_prod(tf.shape(tensor)[kind.dim + 1 :])
        new = tf.maximum(tf.reduce_prod(tf.cast(target, tf.int32)), 1)
        apart = [tf.equal((each * own) % new, 0) for each in kind.per]
        checked = tf.debugging.Assert(tf.reduce_all(apart), ["A reshape puts samples into one row."])
        with tf.control_dependencies([checked]):
            return tuple((each * own) // new for each in kind.per)


# Moving dims


def transpose(call: Call) -> Made:
    """Permute dims."""
    kind, order = call.kinds[0], static(call.partition, call.inputs[1])
    if not isinstance(kind, Rows) or order is None:
        return whole(call)
    return call.inputs, [kind.at([each % len(order) for each in order].index(kind.dim))]


def expand_dims(call: Call) -> Made:
    """Insert a dim of one."""
    kind, axis, rank = call.kinds[0], static(call.partition, call.inputs[1]), call.inputs[0].shape.rank
    if not isinstance(kind, Rows) or axis is None or rank is None:
        return whole(call)
    return call.inputs, [kind.at(kind.dim + (axis[0] % (rank + 1) <= kind.dim))]


def squeeze(call: Call) -> "Made | Outputs":
    """Leave out dims of one, but not that of a single row."""
    kind, tensor = call.kinds[0], call.inputs[0]
    if not isinstance(kind, Rows) or tensor.shape.rank is None:
        return whole(call)
    dims = [each % tensor.shape.rank for each in call.attrs["squeeze_dims"].list.i]
    if kind.dim in dims or not dims:
        return whole(call)
    return call.inputs, [kind.at(kind.dim - sum(each < kind.dim for each in dims))]


def pack(call: Call) -> Made:
    """Stack tensors along a new dim."""
    p, kinds = call.partition, call.kinds
    axis = call.attrs["axis"].i
    like = next((each for each in kinds if isinstance(each, Rows)), None)
    if like is None:
        parts = linear_parts(call)
        return ([p.part(each) for each in call.inputs], [Part()]) if parts else whole(call)
    rank = next(each.shape.rank for each, kind in zip(call.inputs, kinds, strict=True) if kind is like)
    axis %= rank + 1
    return [p.rows(each, like) for each in call.inputs], [like.at(like.dim + (axis <= like.dim))]


def unpack(call: Call) -> Made:
    """Cut a tensor along a dim, which the results lack."""
    kind, rank = call.kinds[0], call.inputs[0].shape.rank
    count = call.attrs["num"].i
    if isinstance(kind, Part):
        return call.inputs, [kind] * count
    axis = call.attrs["axis"].i % rank if rank else 0
    if not isinstance(kind, Rows) or rank is None or axis == kind.dim:
        return whole(call)
    return call.inputs, [kind.at(kind.dim - (axis < kind.dim))] * count


def concat(call: Call) -> Made:
    """Put tensors one behind the other: along the rows, each becomes segments of the result."""
    p, kinds, axis = call.partition, call.kinds[:-1], static(call.partition, call.inputs[-1])
    tensors, rank = call.inputs[:-1], call.inputs[0].shape.rank
    like = next((each for each in kinds if isinstance(each, Rows)), None)
    if axis is None or rank is None:
        return whole(call)
    if like is None:
        parts = linear_parts(call)
        return ([*(p.part(each) for each in tensors), p.whole(call.inputs[-1])], [Part()]) if parts else whole(call)
    if axis[0] % rank != like.dim:
        return [*(p.rows(each, like) for each in tensors), call.inputs[-1]], [like]
    if not all(isinstance(each, Rows) and each.dim == like.dim for each in kinds):
        return whole(call)
    per = [per for each in kinds if isinstance(each, Rows) for per in each.per]
    return call.inputs, [Rows(like.dim, tuple(per))]


def split(call: Call) -> Made:
    """Cut a tensor into equal parts."""
    return _split(call, tensor=1, axis=0, count=call.attrs["num_split"].i)


def split_by_sizes(call: Call) -> Made:
    """Cut a tensor into parts of given sizes."""
    return _split(call, tensor=0, axis=2, count=call.attrs["num_split"].i)


def _split(call: Call, *, tensor: int, axis: int, count: int) -> Made:
    p, kind, rank = call.partition, call.kinds[tensor], call.inputs[tensor].shape.rank
    where = static(p, call.inputs[axis])
    if where is None or rank is None:
        return whole(call)
    if isinstance(kind, Part):
        return [each if index == tensor else p.whole(each) for index, each in enumerate(call.inputs)], [kind] * count
    if not isinstance(kind, Rows):
        return whole(call)
    if where[0] % rank != kind.dim:
        return call.inputs, [kind] * count
    alike = len(kind.per) == count and all(each is kind.per[0] or each == kind.per[0] for each in kind.per)
    return (
        (call.inputs, [Rows(kind.dim, (each,)) for each in kind.per]) if alike and call.type == "Split" else whole(call)
    )


def tile(call: Call) -> Made:
    """Repeat a tensor: along the rows, each copy is a segment."""
    p, kind, counts = call.partition, call.kinds[0], static(call.partition, call.inputs[1])
    known = values_of(p, call.inputs[1])
    if not isinstance(kind, Rows):
        if kind is None and known is not None and len(known.counts) == 1 and call.inputs[0].shape[known.counts[0]] == 1:
            dim = known.counts[0]
            return [call.inputs[0], p.local_shape(call.inputs[1])], [Rows(dim, known.entries[dim].per)]  # type: ignore[union-attr]
        return whole(call)
    if counts is None and known is not None and known.entries[kind.dim] == 1 and not known.counts:
        return call.inputs, [kind]
    if counts is None:
        return whole(call)
    return call.inputs, [Rows(kind.dim, kind.per * counts[kind.dim])]


def pad(call: Call) -> Made:
    """Pad all dims but the rows."""
    p, kind = call.partition, call.kinds[0]
    widths = values_of(p, call.inputs[1])
    if isinstance(kind, Part) and kind.is_linear and call.type == "Pad":
        return [p.part(call.inputs[0]), p.whole(call.inputs[1])], [Part()]
    if not isinstance(kind, Rows) or widths is None or any(each != 0 for each in widths.entries[2 * kind.dim :][:2]):
        return whole(call)
    return [call.inputs[0], *map(p.whole, call.inputs[1:])], [kind]


def broadcast_to(call: Call) -> Made:
    """Broadcast to a shape, whose count of rows becomes this rank's."""
    p, kind, wanted = call.partition, call.kinds[0], values_of(call.partition, call.inputs[1])
    tensor, rank = call.inputs[0], call.inputs[0].shape.rank
    if wanted is None or rank is None:
        return whole(call)
    length = len(wanted.entries)
    if isinstance(kind, Rows):
        dim = kind.dim + length - rank
        entry = wanted.entries[dim]
        if len(wanted.counts) > 1 or not isinstance(entry, Count):
            return whole(call)
        return [tensor, p.local_shape(call.inputs[1])], [Rows(dim, kind.per)]
    if len(wanted.counts) != 1:
        return ([tensor, p.whole(call.inputs[1])], [kind]) if isinstance(kind, Part) else whole(call)
    (dim,) = wanted.counts
    like = Rows(dim, wanted.entries[dim].per)  # type: ignore[union-attr]
    own = dim - (length - rank)
    value = p.whole(tensor)
    if own >= 0 and value.shape[own] is None:
        return whole(call)
    if own >= 0 and value.shape[own] != 1:
        value = p.rows(value, like.at(own))
    return [value, p.local_shape(call.inputs[1])], [like]


def fill(call: Call) -> Made:
    """Fill a shape, whose count of rows becomes this rank's."""
    p, wanted = call.partition, values_of(call.partition, call.inputs[0])
    if wanted is None or len(wanted.counts) != 1:
        return whole(call)
    (dim,) = wanted.counts
    return [p.local_shape(call.inputs[0]), p.whole(call.inputs[1])], [Rows(dim, wanted.entries[dim].per)]  # type: ignore[union-attr]
