"""Propagation rules of TensorFlow ops for sharded dims.

Each function takes an operation and the layouts of its inputs, some of them sharded, and returns the layouts of its
outputs, or None if it cannot be computed from a shard.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.parallel.tensor.flow.layouts import SHAPE, Layout, Rule, constant_value, joined, spans


def _reshaped(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Follow a dim that is kept, split, or first of merged ones."""
    places = _places_in(op, inputs[0].dim)
    return [joined(inputs, places[0])] if places else None


def reshaped_like(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Like `_reshaped`, but use the full op to resolve ambiguous reshapes (e.g. one head per rank)."""
    after, there = op.outputs[0].shape, None if whole is None else whole.outputs[0].shape
    places = _places_in(op, inputs[0].dim)
    if there is not None and there.rank == after.rank:
        places = [place for place in places if after[place] != there[place]] or places
    return [joined(inputs, places[0])] if places else None


def _places_in(op: Any, dim: int | None) -> list[int]:
    """Return the possible positions of `dim` after a reshape."""
    before, after = op.inputs[0].shape, op.outputs[0].shape
    if dim is None or before.rank is None or after.rank is None:
        return []
    place = dim - before.rank
    stays = [place + after.rank] if _same_from(before, after, place) else []
    return [*stays, *([dim] if _regroups(before.as_list(), after.as_list(), dim) else [])]


def _same_from(before: Any, after: Any, place: int) -> bool:
    """Return whether the dims from `place` to the last are unchanged."""
    mine, theirs = before.as_list()[place:], after.as_list()[place:]
    return after.rank >= -place and None not in mine and mine == theirs


def _regroups(before: list[int | None], after: list[int | None], dim: int) -> bool:
    """Return whether a dim is split, or first of merged ones."""
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
    dim, axis = inputs[0].dim, op.get_attr("axis") % op.inputs[0].shape.rank
    return None if dim is None or dim == axis else [joined(inputs, dim - (axis < dim))] * len(op.outputs)


def _packed(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    dims = {layout.dim for layout in inputs}
    dim, axis = inputs[0].dim, op.get_attr("axis") % op.outputs[0].shape.rank
    return None if dim is None or len(dims) != 1 else [joined(inputs, dim + (axis <= dim))]


def _tiled(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    multiples, dim = tf.get_static_value(op.inputs[1], partial=True), inputs[0].dim
    return None if multiples is None or dim is None or multiples[dim] != 1 else [joined(inputs[:1], dim)]


def _padded(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    paddings, dim = constant_value(op.inputs[1]), inputs[0].dim
    return None if paddings is None or dim is None or paddings[dim].any() else [joined(inputs[:1], dim)]


def _split(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Split along another dim; the axis is the first input of `Split`, the last of `SplitV`."""
    place = 1 if op.type == "Split" else 0
    axis, layout = constant_value(op.inputs[0 if op.type == "Split" else 2]), inputs[place]
    if axis is None or layout.dim is None or int(axis) % op.inputs[place].shape.rank == layout.dim:
        return None
    return [layout] * len(op.outputs)


def _strided(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Follow the sharded dim through Python indexing that keeps it whole."""
    found = indexed(op, inputs[0].dim)
    if found is None:
        return None
    place, bounds = found
    return [joined(inputs[:1], place)] if bounds is None else None


def indexed(op: Any, dim: int | None) -> tuple[int, tuple[int, int] | None] | None:
    """Return `dim`'s position after Python indexing, and its bounds or None.

    None if it cannot be followed: unknown bounds, a step other than 1, or the dim is dropped.
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


ELEMENTWISE = frozenset(
    (
        *("Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "CheckNumerics"),
        *("Cast", "Neg", "Abs", "Sign", "Exp", "Expm1", "Log", "Log1p", "Sqrt", "Rsqrt", "Square"),
        *("Reciprocal", "Inv", "Sigmoid", "Tanh", "Relu", "Relu6", "Elu", "Selu", "Softplus"),
        *("Softsign", "LeakyRelu", "Erf", "Erfc", "Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh"),
        *("Floor", "Ceil", "Round", "Rint", "IsFinite", "IsNan", "IsInf", "LogicalNot"),
        *("ZerosLike", "OnesLike", "Add", "AddV2", "AddN", "Sub", "Mul", "MulNoNan", "Div"),
        *("RealDiv", "DivNoNan", "FloorDiv", "FloorMod", "Pow", "SquaredDifference", "Maximum"),
        *("Minimum", "Equal", "NotEqual", "Less", "LessEqual", "Greater", "GreaterEqual"),
        *("LogicalAnd", "LogicalOr", "Select", "SelectV2", "Xlogy", "ClipByValue"),
    )
)
OF_SHAPE = frozenset(("Shape", "ShapeN", "Rank", "Size"))
"""Operations on the shape only."""
FILLED = frozenset(("Fill", "ZerosLike", "OnesLike"))


def outputs_of(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Return the output layouts of `op` with sharded inputs; None if it needs them in full."""
    if op.type in OF_SHAPE:
        return [SHAPE] * len(op.outputs)
    if op.type in ("Identity", "IdentityN"):
        return list(inputs[: len(op.outputs)])
    rule = _elementwise if op.type in ELEMENTWISE else RULES.get(op.type)
    return None if rule is None else rule(op, inputs)


def _elementwise(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Align dims from the last, as in broadcasting.

    A full trained tensor would get a partial gradient; only gradients of variables themselves can be summed.
    """
    places = {layout.dim - op.inputs[i].shape.rank for i, layout in enumerate(inputs) if layout.dim is not None}
    if len(places) != 1:
        return None
    place = places.pop()
    for tensor, layout in zip(op.inputs, inputs, strict=True):
        if layout.dim is None and not _goes_with_slice(tensor, layout, place):
            return None
    return [joined(inputs, place + output.shape.rank) for output in op.outputs]


def _goes_with_slice(tensor: Any, layout: Layout, place: int) -> bool:
    """Return whether a full tensor suits any shard of dim `place`."""
    if layout.learned and not layout.parameters:
        return False
    return layout.even or place in layout.even_dims or not spans(tensor, place)


def _along_last(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    last = op.inputs[0].shape.rank - 1
    return None if inputs[0].dim == last else [inputs[0]] * len(op.outputs)


def _reduced(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    axes = constant_value(op.inputs[1])
    dim, rank = inputs[0].dim, op.inputs[0].shape.rank
    if axes is None or dim is None:
        return None
    gone = {int(axis) % rank for axis in axes.reshape(-1)}
    if dim in gone:
        return None
    kept = op.get_attr("keep_dims")
    return [joined(inputs, dim if kept else dim - sum(axis < dim for axis in gone))]


def _along_axis(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    axes, dim, rank = constant_value(op.inputs[1]), inputs[0].dim, op.inputs[0].shape.rank
    if axes is None or dim is None or dim in {int(axis) % rank for axis in axes.reshape(-1)}:
        return None
    return [joined(inputs[:1], dim)]


def _multiplied(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Propagate through matrix products with sharded batch dims, such as heads; others would be partial sums."""
    if any(tensor.shape.rank is None for tensor in op.inputs):
        return None
    pairs = zip(op.inputs, inputs, strict=True)
    places = [layout.dim - tensor.shape.rank for tensor, layout in pairs if layout.dim is not None]
    if len(places) != 2 or places[0] != places[1] or places[0] > -3:
        return None
    return [joined(inputs, places[0] + op.outputs[0].shape.rank)]


def _einsum(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Propagate a sharded label that all factors and the output share."""
    *terms, output = op.get_attr("equation").decode().replace(" ", "").replace("->", ",").split(",")
    if "..." in output or any(layout.dim is None for layout in inputs):
        return None
    labels = {term[layout.dim] for term, layout in zip(terms, inputs, strict=True)}
    label = labels.pop()
    return None if labels or label not in output else [joined(inputs, output.index(label))]


def _pooled(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Pool within each channel: windows have one element along the sharded dim."""
    dim = inputs[0].dim
    alone = dim is not None and op.get_attr("ksize")[dim] == op.get_attr("strides")[dim] == 1
    return [joined(inputs, dim)] if alone else None


def _resized(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    return [joined(inputs, 3)] if inputs[0].dim == 3 else None


RULES: dict[str, Rule] = {
    **MOVES,
    "Softmax": _along_last,
    "LogSoftmax": _along_last,
    **dict.fromkeys(("Sum", "Mean", "Max", "Min", "Prod", "All", "Any"), _reduced),
    **dict.fromkeys(("Cumsum", "Cumprod", "ReverseV2"), _along_axis),
    **dict.fromkeys(("BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _multiplied),
    "Einsum": _einsum,
    **dict.fromkeys(("MaxPool", "MaxPool3D", "AvgPool", "AvgPool3D"), _pooled),
    **dict.fromkeys(("ResizeNearestNeighbor", "ResizeBilinear", "ResizeBicubic"), _resized),
}
