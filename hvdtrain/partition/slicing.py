"""Rules of slices and lookups."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.partition.kinds import Count, Part, Rows, Sizes
from hvdtrain.partition.partition import Partition, spelled
from hvdtrain.partition.rules import Call, Made, Outputs, Rule, whole
from hvdtrain.partition.sizes import static, total, values_of


def strided_slice(call: Call) -> "Made | Outputs":
    """Slice dims: the rows stay whole, or segments of them are taken."""
    p, kind = call.partition, call.kinds[0]
    if not isinstance(kind, Rows) or call.inputs[0].shape.rank is None:
        return whole(call)
    found = _place_in_slice(call, kind.dim)
    if found is None:
        return whole(call)
    index, dim = found
    if index < 0:
        return call.inputs, [kind.at(dim)]
    masks = [call.attrs[name].i >> index & 1 for name in ("begin_mask", "end_mask")]
    begins, ends, strides = (values_of(p, each) for each in call.inputs[1:4])
    if all(masks) and _entry(strides, index) == 1:
        return call.inputs, [kind.at(dim)]
    if len(kind.per) == 1 and not masks[1] and _is_count(_entry(ends, index), kind.per) and _entry(begins, index) == 0:
        return [*call.inputs[:2], p.local_shape(call.inputs[2]), call.inputs[3]], [kind.at(dim)]  # by their number
    return _segments_taken(call, kind, index=index, dim=dim, masks=masks)


def _segments_taken(call: Call, kind: Rows, *, index: int, dim: int, masks: Sequence[int]) -> Made:
    """Take whole segments of the rows."""
    p = call.partition
    begins, ends, strides = (values_of(p, each) for each in call.inputs[1:4])
    if len(kind.per) == 1 or _entry(strides, index) != 1 or begins is None or ends is None:
        return whole(call)
    bounds = _bounds(kind.per)
    first = 0 if masks[0] else _position(begins.entries[index], bounds)
    last = len(kind.per) if masks[1] else _position(ends.entries[index], bounds)
    if first is None or last is None or first >= last:
        return whole(call)
    made = [
        _bound(p, tensor, index, kind.per[:place])
        for tensor, place in zip(call.inputs[1:3], (first, last), strict=True)
    ]
    return [call.inputs[0], *made, call.inputs[3]], [Rows(dim, kind.per[first:last])]


def _bound(p: Partition, vector: tf.Tensor, index: int, per: Sequence[Any]) -> tf.Tensor:
    """Return a bound of a slice with this rank's rows at `index`."""
    known = values_of(p, vector)
    assert known is not None
    entries = list(known.entries)
    entries[index] = Count(tuple(per)) if per else 0
    bound = Sizes(tuple(entries))
    with p.plain():
        given = spelled(vector, replace(known, entries=(*entries[:index], 0, *entries[index + 1 :])))
    return p.local_sizes(given, bound)


def _bounds(per: Sequence[Any]) -> list[Any]:
    """Return where segments begin and end."""
    return [0, *(Count(tuple(per[: each + 1])) for each in range(len(per)))]


def _position(entry: Any, bounds: Sequence[Any]) -> int | None:
    """Return which bound of segments an entry is."""
    if entry == 0:
        return 0
    if not isinstance(entry, Count):
        return None
    return next(
        (index for index, each in enumerate(bounds) if isinstance(each, Count) and _is_count(entry, each.per)), None
    )


def _is_count(entry: Any, per: Sequence[Any]) -> bool:
    """Return whether an entry counts so many rows a sample."""
    if not isinstance(entry, Count):
        return False
    if all(isinstance(each, int) for each in (*entry.per, *per)):
        return sum(entry.per) == sum(per)
    return len(entry.per) == len(per) and all(one is other for one, other in zip(entry.per, per, strict=True))


def _entry(known: Sizes | None, index: int) -> Any:
    return None if known is None or index >= len(known.entries) else known.entries[index]


def _place_in_slice(call: Call, dim: int) -> tuple[int, int] | None:
    """Return which entry of a slice is about `dim` (-1: none), and which dim of the result that is; None: none is."""
    attrs, rank = call.attrs, call.inputs[0].shape.rank if call.type == "StridedSlice" else None
    length = call.inputs[1].shape[0]
    if length is None:
        return None
    entry, of_input, of_result = 0, 0, 0
    if rank is None:
        known = values_of(call.partition, call.inputs[0])
        rank = None if known is None else len(known.entries)
    if rank is None:
        return None
    news = sum(attrs["new_axis_mask"].i >> each & 1 for each in range(length))
    while entry < length:
        if attrs["ellipsis_mask"].i >> entry & 1:
            skipped = rank - (length - 1 - news)
            if of_input <= dim < of_input + skipped:
                return -1, of_result + dim - of_input
            of_input, of_result = of_input + skipped, of_result + skipped
        elif attrs["new_axis_mask"].i >> entry & 1:
            of_result += 1
        else:
            shrinks = attrs["shrink_axis_mask"].i >> entry & 1
            if of_input == dim:
                return None if shrinks else (entry, of_result)
            of_input, of_result = of_input + 1, of_result + (not shrinks)
        entry += 1
    return -1, of_result + dim - of_input


def strided_slice_gradient(call: Call) -> Made:
    """Put the gradient of a slice into zeros."""
    p, kind = call.partition, call.kinds[4]
    wanted = values_of(p, call.inputs[0])
    if isinstance(kind, Part) and kind.is_linear and (wanted is None or not wanted.counts):
        return [*map(p.whole, call.inputs[:4]), p.part(call.inputs[4])], [Part()]
    if not isinstance(kind, Rows) or wanted is None or len(wanted.counts) != 1:
        return whole(call)
    (dim,) = wanted.counts
    found = _place_in_slice(call, dim)
    if found is None or found[1] != kind.dim:
        return whole(call)
    index, _ = found
    masks = [call.attrs[name].i >> index & 1 for name in ("begin_mask", "end_mask")] if index >= 0 else [1, 1]
    per = wanted.entries[dim].per  # type: ignore[union-attr]
    inputs = [p.local_shape(call.inputs[0]), *call.inputs[1:]]
    if all(masks):
        return inputs, [Rows(dim, per)]
    begins, ends = (values_of(p, each) for each in call.inputs[1:3])
    bounds = _bounds(per)
    first = 0 if masks[0] else _position(_entry(begins, index), bounds)
    last = len(per) if masks[1] else _position(_entry(ends, index), bounds)
    if first is None or last is None or begins is None or ends is None:
        return whole(call)
    inputs[1], inputs[2] = (_bound(p, call.inputs[place], index, per[:end]) for place, end in ((1, first), (2, last)))
    return inputs, [Rows(dim, per)]


def slice_of(call: Call) -> Made:
    """Slice by begins and sizes: the rows stay whole, or segments of them are taken."""
    p, kind = call.partition, call.kinds[0]
    begins, sizes = (values_of(p, each) for each in call.inputs[1:3])
    if not isinstance(kind, Rows) or begins is None or sizes is None:
        return whole(call)
    begin, rows = begins.entries[kind.dim], sizes.entries[kind.dim]
    if begin == 0 and rows == -1:
        return call.inputs, [kind]
    bounds = _bounds(kind.per)
    first = _position(begin, bounds)
    last = None if first is None else _position(total((begin, rows)), bounds)
    if first is None or last is None or first >= last:
        return whole(call)
    starts = _bound(p, call.inputs[1], kind.dim, kind.per[:first])
    lengths = _bound(p, call.inputs[2], kind.dim, kind.per[first:last])
    return [call.inputs[0], starts, lengths], [Rows(kind.dim, kind.per[first:last])]


def offsets(call: Call) -> Made:
    """Compute where tensors begin that are put one behind the other."""
    p = call.partition
    axis, shapes = static(p, call.inputs[0]), [values_of(p, each) for each in call.inputs[1:]]
    inputs: list[Any] = [p.whole(each) for each in call.inputs]
    made: list[Sizes] = []
    entry: Any = 0
    for each in shapes:
        if axis is None or each is None:
            return inputs, []
        made.append(
            Sizes(tuple(entry if dim == axis[0] % len(each.entries) else 0 for dim in range(len(each.entries))))
        )
        entry = total((entry, each.entries[axis[0]]))
    return inputs, made


# Gathering and others


def gather(call: Call) -> Made:
    """Look up rows of a table, or take along another dim than the rows."""
    p, (table, places, _) = call.partition, call.kinds
    axis, rank = static(p, call.inputs[2]), call.inputs[0].shape.rank
    stacked, depth = call.attrs["batch_dims"].i, call.inputs[1].shape.rank
    if axis is None or rank is None or depth is None:
        return whole(call)
    along = axis[0] % rank
    if isinstance(table, Rows) and stacked and table.dim < stacked:
        return [call.inputs[0], p.rows(call.inputs[1], table), call.inputs[2]], [table]
    if stacked:
        return whole(call)
    if isinstance(table, Rows) and table.dim != along:
        moved = table.dim if table.dim < along else table.dim + depth - 1
        return [call.inputs[0], p.whole(call.inputs[1]), call.inputs[2]], [table.at(moved)]
    if isinstance(places, Rows):
        return [p.whole(call.inputs[0]), call.inputs[1], call.inputs[2]], [places.at(places.dim + along)]
    return whole(call)


def resource_gather(call: Call) -> Made:
    """Look up rows of a variable."""
    kind = call.kinds[1]
    return (call.inputs, [kind]) if isinstance(kind, Rows) and not call.attrs["batch_dims"].i else whole(call)


def gather_nd(call: Call) -> Made:
    """Look up elements at places that rows name."""
    p, kind, depth = call.partition, call.kinds[1], call.inputs[1].shape.rank
    if not isinstance(kind, Rows) or depth is None or kind.dim == depth - 1:
        return whole(call)
    return [p.whole(call.inputs[0]), call.inputs[1]], [kind]


def one_hot(call: Call) -> Made:
    """Encode numbers."""
    p, kind, rank = call.partition, call.kinds[0], call.inputs[0].shape.rank
    if not isinstance(kind, Rows) or rank is None:
        return whole(call)
    axis = call.attrs["axis"].i
    return [call.inputs[0], *map(p.whole, call.inputs[1:])], [kind.at(kind.dim + (axis != -1 and axis <= kind.dim))]


def along(index: int, *, drops: bool = False) -> Rule:
    """Return the rule of operations along dims that input `index` names, which the result may lack."""

    def rule(call: Call) -> Made:
        p, kind, rank = call.partition, call.kinds[0], call.inputs[0].shape.rank
        axes = static(p, call.inputs[index])
        if not isinstance(kind, Rows) or axes is None or rank is None:
            return whole(call)
        axes = [each % rank for each in axes]
        if kind.dim in axes:
            return whole(call)
        moved = kind.dim - (sum(each < kind.dim for each in axes) if drops else 0)
        return [call.inputs[0], *map(p.whole, call.inputs[1:])], [kind.at(moved)]

    return rule


def gradient_axes(call: Call) -> "Made | Outputs":
    """Find out which dims of two shapes were broadcast, where possible before the step runs."""
    p = call.partition
    one, other = (values_of(p, each) for each in call.inputs)
    if one is None or other is None:
        return whole(call)
    rank = max(len(one.entries), len(other.entries))
    first = (*[1] * (rank - len(one.entries)), *one.entries)
    second = (*[1] * (rank - len(other.entries)), *other.entries)
    of_first, of_second = [], []
    for dim, (a, b) in enumerate(zip(first, second, strict=True)):
        if a == 1 and b != 1:
            of_first.append(dim)
        elif b == 1 and a != 1:
            of_second.append(dim)
        elif a == 1 and b == 1:  # TensorFlow names these, too; their sum changes nothing
            continue
        elif (a is None or b is None) and not (isinstance(a, Count) or isinstance(b, Count)) and a is not b:
            return whole(call)
    with p.plain():
        dtype = call.inputs[0].dtype
        axes = [tf.constant(dims, dtype, [len(dims)]) for dims in (of_first, of_second)]
    return Outputs(axes, [Sizes(tuple(dims)) for dims in (of_first, of_second)])
