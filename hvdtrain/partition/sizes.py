"""Integer tensors that a step computes from shapes: which entries count rows of the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.partition.kinds import Count, Entry, Part, Rows, Sizes, times
from hvdtrain.partition.partition import Partition

LARGEST = 64
"""Entries of a vector that are followed."""


def values_of(partition: Partition, tensor: Any) -> Sizes | None:
    """Return what is known of the entries of an integer tensor [k] or []; None: nothing."""
    kind = partition.kind(tensor)
    if isinstance(kind, Sizes):
        return kind
    if kind is not None or not tensor.dtype.is_integer or tensor.shape.rank not in (0, 1, 2):
        return None
    known = tf.get_static_value(tensor)
    if known is None or np.size(known) > LARGEST:
        return None
    width = np.shape(known)[1] if np.ndim(known) == 2 else 0
    return Sizes(tuple(int(each) for each in np.ravel(known)), scalar=np.ndim(known) == 0, width=width)


def static(partition: Partition, tensor: Any) -> list[int] | None:
    """Return the entries of an integer tensor [k] or [] if all are known numbers."""
    found = values_of(partition, tensor)
    if found is None or found.width or not all(isinstance(each, int) for each in found.entries):
        return None
    return list(found.entries)  # type: ignore[arg-type]


def shape_of(partition: Partition, tensor: tf.Tensor) -> Sizes | None:
    """Return the true shape of a tensor."""
    if tensor.shape.rank is None:
        return None
    entries: list[Entry] = list(tensor.shape.as_list())
    kind = partition.kind(tensor)
    if isinstance(kind, Rows):
        entries[kind.dim] = Count(kind.per)
    elif kind is not None and not isinstance(kind, Part | Sizes):
        return None
    return Sizes(tuple(entries))


def followed(partition: Partition, op_type: str, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    """Return what is known of the integers that an operation makes of others."""
    rule = _RULES.get(op_type)
    if rule is None:
        return None
    return rule(partition, inputs, attrs)


def product(entries: Sequence[Entry], unknown: Callable[[int], Any] | None = None) -> Entry:
    """Return a product, of which one factor may count rows; `unknown` gives factors that are known at run time."""
    counts = [each for each in entries if isinstance(each, Count)]
    factor: Any = 1
    for index, each in enumerate(entries):
        if isinstance(each, Count):
            continue
        if each is None and unknown is None:
            return None
        factor = factor * (unknown(index) if each is None else each)  # type: ignore[misc]
    if len(counts) > 1:
        return None
    if counts:
        return Count(times(counts[0].per, factor))
    return factor if isinstance(factor, int) else None


def total(entries: Sequence[Entry]) -> Entry:
    """Return a sum, of numbers or of counts of rows."""
    result: Entry = 0
    for each in entries:
        result = _plus(result, each)
    return result


def _each(partition: Partition, inputs: Sequence[Any]) -> list[Sizes] | None:
    found = [values_of(partition, each) for each in inputs]
    return None if None in found else found  # type: ignore[return-value]


def _same(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    return values_of(partition, inputs[0])


def _arithmetic(operation: Callable[[Entry, Entry], Entry]) -> Callable[..., Sizes | None]:
    def rule(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
        found = _each(partition, inputs)
        if found is None:
            return None
        one, other = found
        if one.width != other.width:
            return None
        length = max(len(one.entries), len(other.entries))
        if length not in (len(one.entries), 1) or len(other.entries) not in (1, length):
            return None
        first = one.entries * (length if len(one.entries) == 1 else 1)
        second = other.entries * (length if len(other.entries) == 1 else 1)
        return Sizes(tuple(map(operation, first, second)), scalar=one.scalar and other.scalar, width=one.width)

    return rule


def _times(one: Entry, other: Entry) -> Entry:
    return product((one, other))


def _numbers(operation: Callable[[int, int], int]) -> Callable[[Entry, Entry], Entry]:
    def compute(one: Entry, other: Entry) -> Entry:
        return operation(one, other) if isinstance(one, int) and isinstance(other, int) else None

    return compute


def _plus(one: Entry, other: Entry) -> Entry:
    if isinstance(one, Count) and other == 0:
        return one
    if isinstance(other, Count) and one == 0:
        return other
    if isinstance(one, Count) and isinstance(other, Count):
        return Count((*one.per, *other.per))
    return _numbers(lambda a, b: a + b)(one, other)


def _minus(one: Entry, other: Entry) -> Entry:
    if isinstance(one, Count) and isinstance(other, Count):
        return 0 if _same_count(one, other) else None
    return one if other == 0 else _numbers(lambda a, b: a - b)(one, other)


def _same_count(one: Count, other: Count) -> bool:
    if all(isinstance(each, int) for each in (*one.per, *other.per)):
        return sum(one.per) == sum(other.per)
    return len(one.per) == len(other.per) and all(a is b for a, b in zip(one.per, other.per, strict=True))


def _over(one: Entry, other: Entry) -> Entry:
    if isinstance(one, Count) and isinstance(other, int):
        exact = all(isinstance(per, int) and other and per % other == 0 for per in one.per)
        return Count(tuple(per // other for per in one.per)) if exact else None
    return _numbers(lambda a, b: a // b if b else 0)(one, other)


def _largest(one: Entry, other: Entry) -> Entry:
    # Of a count of rows and a bound that no batch falls short of.
    for count, bound in ((one, other), (other, one)):
        if isinstance(count, Count) and isinstance(bound, int) and bound <= 1:
            return count
    if isinstance(one, Count) and isinstance(other, Count):
        return one if _same_count(one, other) else None
    return _numbers(max)(one, other)


def _broadcast(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found = _each(partition, inputs)
    if found is None or any(each.scalar or each.width for each in found):
        return None
    rank = max(len(each.entries) for each in found)
    one, other = ((*[1] * (rank - len(each.entries)), *each.entries) for each in found)
    return Sizes(tuple(_largest(a, b) for a, b in zip(one, other, strict=True)))


def _padded(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found, widths = values_of(partition, inputs[0]), values_of(partition, inputs[1])
    filled = static(partition, inputs[2]) if len(inputs) > 2 else [0]
    if found is None or found.width or widths is None or filled is None:
        return None
    before, behind = widths.entries
    if not isinstance(before, int) or not isinstance(behind, int):
        return None
    return Sizes((*filled * before, *found.entries, *filled * behind))


def _packed(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found = [values_of(partition, each) for each in inputs]
    if not all(each.dtype.is_integer for each in inputs):
        return None
    if all(each.shape.rank == 1 for each in inputs) and attrs["axis"].i == 0:
        if any(each is None or each.width for each in found):
            return None
        rows = [each.entries for each in found if each is not None]
        return Sizes(tuple(entry for row in rows for entry in row), width=len(rows[0]))
    if any(each.shape.rank != 0 for each in inputs):
        return None
    return Sizes(tuple(None if each is None else each.entries[0] for each in found))


def _concatenated(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    entries: list[Entry] = []
    columns = [values_of(partition, each) for each in inputs[:-1]]
    if any(each is not None and each.width for each in columns):
        if static(partition, inputs[-1]) != [1] or any(each is None or each.width != 1 for each in columns):
            return None
        rows = zip(*(each.entries for each in columns if each is not None), strict=True)
        return Sizes(tuple(entry for row in rows for entry in row), width=len(columns))
    for each, found in zip(inputs[:-1], columns, strict=True):
        if found is None:
            if each.shape.rank != 1 or each.shape[0] is None:
                return None
            entries += [None] * each.shape[0]
        else:
            entries += found.entries
    return Sizes(tuple(entries))


def _sliced(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found = values_of(partition, inputs[0])
    bounds = [static(partition, each) for each in inputs[1:4]]
    if found is None or found.scalar or found.width or any(each is None or len(each) != 1 for each in bounds):
        return None
    (begin,), (end,), (stride,) = bounds  # type: ignore[misc]
    if attrs["ellipsis_mask"].i or attrs["new_axis_mask"].i:
        return None
    if attrs["shrink_axis_mask"].i:
        inside = -len(found.entries) <= begin < len(found.entries)
        return Sizes((found.entries[begin],), scalar=True) if inside else None
    first = None if attrs["begin_mask"].i else begin
    last = None if attrs["end_mask"].i else end
    return Sizes(found.entries[first:last:stride])


def _product(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found = values_of(partition, inputs[0])
    if found is None or found.scalar or static(partition, inputs[1]) not in ([0], [-1]):
        return None
    vector = inputs[0]

    def read(index: int) -> tf.Tensor:
        with partition.plain():
            return tf.cast(vector[index], tf.int32)

    result = product(found.entries, read if any(isinstance(each, Count) for each in found.entries) else None)
    keeps = attrs["keep_dims"].b
    return Sizes((result,), scalar=not keeps)


def _range(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    bounds = [static(partition, each) for each in inputs]
    if any(each is None for each in bounds):
        return None
    (start,), (limit,), (delta,) = bounds  # type: ignore[misc]
    numbers = range(start, limit, delta or 1)
    return Sizes(tuple(numbers)) if len(numbers) <= LARGEST else None


def _stitched(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    half = len(inputs) // 2
    entries: dict[int, Entry] = {}
    for places, data in zip(inputs[:half], inputs[half:], strict=True):
        where, found = static(partition, places), values_of(partition, data)
        if where is None or (found is not None and len(found.entries) != len(where)):
            return None
        for index, place in enumerate(where):
            entries[place] = None if found is None else found.entries[index]
    if sorted(entries) != list(range(len(entries))):
        return None
    return Sizes(tuple(entries[place] for place in range(len(entries))))


def _gathered(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found, places = values_of(partition, inputs[0]), values_of(partition, inputs[1])
    if found is None or places is None or found.scalar or attrs["batch_dims"].i:
        return None
    if not all(isinstance(each, int) and -len(found.entries) <= each < len(found.entries) for each in places.entries):
        return None
    return Sizes(tuple(found.entries[each] for each in places.entries), scalar=places.scalar)  # type: ignore[index]


def _reshaped(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found, shape = values_of(partition, inputs[0]), static(partition, inputs[1])
    if found is None or shape is None or len(shape) > 2:
        return None
    return Sizes(found.entries, scalar=not shape, width=_width(shape, len(found.entries)))


def _width(shape: Sequence[int], length: int) -> int:
    """Return the columns of a matrix of a shape, in which -1 stands for what is left; 0 of a vector."""
    if len(shape) < 2:
        return 0
    return length // max(shape[0], 1) if shape[1] == -1 else shape[1]


def _column(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found, begin, size = values_of(partition, inputs[0]), static(partition, inputs[1]), static(partition, inputs[2])
    if found is None or found.scalar or begin is None or size is None:
        return None
    if not found.width:
        return Sizes(found.entries[begin[0] :][: size[0]] if size[0] >= 0 else found.entries[begin[0] :])
    rows = len(found.entries) // found.width
    if begin[0] or size[0] not in (-1, rows) or size[1] < 0:
        return None
    picked = range(begin[1], begin[1] + size[1])
    return Sizes(
        tuple(found.entries[row * found.width + column] for row in range(rows) for column in picked), width=size[1]
    )


def _expanded(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found = values_of(partition, inputs[0])
    return Sizes(found.entries) if found is not None and found.scalar else None


def _squeezed(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found = values_of(partition, inputs[0])
    return Sizes(found.entries, scalar=True) if found is not None and len(found.entries) == 1 else None


def _size(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    shape = shape_of(partition, inputs[0])
    result = None if shape is None else product(shape.entries)
    return None if result is None else Sizes((result,), scalar=True)


def _inverted(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    order = static(partition, inputs[0])
    return None if order is None else Sizes(tuple(order.index(each) for each in range(len(order))))


def _transposed(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    found = values_of(partition, inputs[0])
    if found is None or not found.width or static(partition, inputs[1]) != [1, 0]:
        return None
    columns = [found.entries[place :: found.width] for place in range(found.width)]
    return Sizes(tuple(entry for column in columns for entry in column), width=len(columns[0]))


def _rank(partition: Partition, inputs: Sequence[Any], attrs: Mapping[str, Any]) -> Sizes | None:
    return None if inputs[0].shape.rank is None else Sizes((inputs[0].shape.rank,), scalar=True)


_RULES: Mapping[str, Callable[[Partition, Sequence[Any], Mapping[str, Any]], Sizes | None]] = {
    **dict.fromkeys(("Identity", "Cast", "StopGradient", "EnsureShape", "PlaceholderWithDefault"), _same),
    "Mul": _arithmetic(_times),
    **dict.fromkeys(("AddV2", "Add"), _arithmetic(_plus)),
    "Sub": _arithmetic(_minus),
    **dict.fromkeys(("FloorDiv", "Div", "RealDiv"), _arithmetic(_over)),
    "FloorMod": _arithmetic(_numbers(lambda one, other: one % other if other else 0)),
    "Maximum": _arithmetic(_largest),
    "BroadcastArgs": _broadcast,
    **dict.fromkeys(("Pad", "PadV2"), _padded),
    "Minimum": _arithmetic(_numbers(min)),
    "Pack": _packed,
    "ConcatV2": _concatenated,
    "StridedSlice": _sliced,
    "Slice": _column,
    "Prod": _product,
    "Range": _range,
    **dict.fromkeys(("DynamicStitch", "ParallelDynamicStitch"), _stitched),
    "GatherV2": _gathered,
    "Reshape": _reshaped,
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "Size": _size,
    "Rank": _rank,
    "Transpose": _transposed,
    "InvertPermutation": _inverted,
}
