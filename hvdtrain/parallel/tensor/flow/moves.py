"""Operations that move elements and compute nothing: what becomes of a sharded dim that they split, merge or turn."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.parallel.tensor.flow.layouts import Layout, Rule, constant_value, joined


def _reshaped(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Follow a dim that stays, that is split, or that is the first of several which are merged."""
    places = _places_in(op, inputs[0].dim)
    return [joined(inputs, places[0])] if places else None


def reshaped_like(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Do the same where the dim may have gone to several places, as with one head on each rank.

    Args:
        op: the operation on a slice.
        inputs: layouts of its inputs.
        whole: the same operation in the whole model, whose shape differs in the right place; None where there is none.
    """
    after, there = op.outputs[0].shape, None if whole is None else whole.outputs[0].shape
    places = _places_in(op, inputs[0].dim)
    if there is not None and there.rank == after.rank:
        places = [place for place in places if after[place] != there[place]] or places
    return [joined(inputs, places[0])] if places else None


def _places_in(op: Any, dim: int | None) -> list[int]:
    """Return where `dim` may be after a reshape."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if dim is None or before.rank is None or after.rank is None:
        return []
    place = dim - before.rank
    stays = [place + after.rank] if _same_from(before, after, place) else []
    return [*stays, *([dim] if _regroups(before.as_list(), after.as_list(), dim) else [])]


def _same_from(before: Any, after: Any, place: int) -> bool:
    """Whether the dims from `place` to the last are the same, so that those in front were merged or split alone."""
    mine, theirs = before.as_list()[place:], after.as_list()[place:]
    return after.rank >= -place and None not in mine and mine == theirs


def _regroups(before: list[int | None], after: list[int | None], dim: int) -> bool:
    """Whether a dim is split into several, or is the first of several which are merged."""
    alike = 0
    while alike < min(len(before), len(after)) and before[alike] == after[alike] and alike < dim:
        alike += 1
    if alike != dim or before[:dim].count(None) > 1:
        return False
    mine, theirs = before[dim:], after[dim:]
    return None not in mine and None not in theirs and _product(mine) == _product(theirs) and bool(theirs)


def _product(lengths: Sequence[int | None]) -> int:
    product = 1
    for length in lengths:
        product *= length or 0
    return product


def _transposed(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    order, dim = constant_value(op.inputs[1]), inputs[0].dim
    return None if order is None or dim is None else [joined(inputs, [int(axis) for axis in order].index(dim))]


def _expanded(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    axis, dim = constant_value(op.inputs[1]), inputs[0].dim
    if axis is None or dim is None:
        return None
    where = int(axis.reshape(-1)[0]) % op.outputs[0].shape.rank
    return [joined(inputs, dim + (where <= dim))]


def _squeezed(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Drop other dims, which are named."""
    dim, rank = inputs[0].dim, op.inputs[0].shape.rank
    gone = {axis % rank for axis in op.get_attr("squeeze_dims")}
    return None if dim is None or not gone or dim in gone else [joined(inputs, dim - sum(axis < dim for axis in gone))]


def _concatenated(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    *parts, _ = inputs
    axis = constant_value(op.inputs[-1])
    dims = {layout.dim for layout in parts}
    if axis is None or len(dims) != 1:
        return None
    dim = dims.pop()
    return None if dim is None or int(axis) % op.outputs[0].shape.rank == dim else [joined(parts, dim)]


def _unpacked(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Cut along another dim, which is gone."""
    dim, axis = inputs[0].dim, op.get_attr("axis") % op.inputs[0].shape.rank
    return None if dim is None or dim == axis else [joined(inputs, dim - (axis < dim))] * len(op.outputs)


def _packed(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Put slices side by side along a new dim."""
    dims = {layout.dim for layout in inputs}
    dim, axis = inputs[0].dim, op.get_attr("axis") % op.outputs[0].shape.rank
    return None if dim is None or len(dims) != 1 else [joined(inputs, dim + (axis <= dim))]


def _tiled(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Repeat along other dims."""
    multiples, dim = tf.get_static_value(op.inputs[1], partial=True), inputs[0].dim
    return None if multiples is None or dim is None or multiples[dim] != 1 else [joined(inputs[:1], dim)]


def _padded(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Pad other dims."""
    paddings, dim = constant_value(op.inputs[1]), inputs[0].dim
    return None if paddings is None or dim is None or paddings[dim].any() else [joined(inputs[:1], dim)]


def _split(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Cut along another dim; the axis comes first of `Split`, and last of `SplitV`."""
    place = 1 if op.type == "Split" else 0
    axis, layout = constant_value(op.inputs[0 if op.type == "Split" else 2]), inputs[place]
    if axis is None or layout.dim is None or int(axis) % op.inputs[place].shape.rank == layout.dim:
        return None
    return [layout] * len(op.outputs)


def _strided(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Follow the sharded dim through Python's indexing, which must leave all of it."""
    found = indexed(op, inputs[0].dim)
    if found is None:
        return None
    place, bounds = found
    return [joined(inputs[:1], place)] if bounds is None else None


def indexed(op: Any, dim: int | None) -> tuple[int, tuple[int, int] | None] | None:
    """Return where `dim` is after Python's indexing, and the bounds of what is left of it, None of all.

    None stands for what cannot be followed: bounds that are not known, another step than 1, a dim that is gone.
    """
    bounds = [constant_value(tensor) for tensor in op.inputs[1:]]
    if any(bound is None for bound in bounds) or dim is None:
        return None
    masks = {name: op.get_attr(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    count, rank = len(bounds[0]), op.inputs[0].shape.rank
    named = sum(not masks["new_axis"] >> i & 1 and not masks["ellipsis"] >> i & 1 for i in range(count))
    places: list[int | None] = []
    taken, kept = 0, None
    length = op.inputs[0].shape[dim]
    for i in range(count):
        bit = {name: bool(mask >> i & 1) for name, mask in masks.items()}
        if bit["ellipsis"]:
            places += range(taken, taken + rank - named)
            taken += rank - named
        elif bit["new_axis"]:
            places.append(None)
        else:
            if taken == dim and (bit["shrink_axis"] or bounds[2][i] != 1):
                return None
            if taken == dim and not (bit["begin"] and bit["end"]):
                if length is None:
                    return None
                first, last = (None if bit[end] else int(bounds[p][i]) for p, end in enumerate(("begin", "end")))
                kept = slice(first, last).indices(length)[:2]
            places += [] if bit["shrink_axis"] else [taken]
            taken += 1
    return [*places, *range(taken, rank)].index(dim), kept


MOVES: dict[str, Rule] = {
    "Reshape": _reshaped,
    "Transpose": _transposed,
    "ExpandDims": _expanded,
    "Squeeze": _squeezed,
    "ConcatV2": _concatenated,
    "Unpack": _unpacked,
    "Pack": _packed,
    "Tile": _tiled,
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad"), _padded),
    "Split": _split,
    "SplitV": _split,
    "StridedSlice": _strided,
}
