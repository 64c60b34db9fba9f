"""What TensorFlow's operations do with a sharded dim.

Each function is given an operation and the layouts of its inputs, some of which are sharded, and returns the layouts of
its outputs; None stands for what no rank could compute from its slice alone.
"""

from collections.abc import Sequence
from typing import Any

from hvdtrain.parallel.tensor.flow.layouts import SHAPE, Layout, Rule, constant_value, joined, spans
from hvdtrain.parallel.tensor.flow.moves import MOVES

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
"""Operations on the shape alone."""
FILLED = frozenset(("Fill", "ZerosLike", "OnesLike"))


def outputs_of(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Return the layouts of the outputs of `op`, some of whose inputs are sharded; None if it needs them whole."""
    if op.type in OF_SHAPE:
        return [SHAPE] * len(op.outputs)
    if op.type in ("Identity", "IdentityN"):
        return list(inputs[: len(op.outputs)])
    rule = _elementwise if op.type in ELEMENTWISE else RULES.get(op.type)
    return None if rule is None else rule(op, inputs)


def _elementwise(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Take dims from the last, as broadcasting does.

    A whole tensor that is learned would get a part of its gradient; of variables themselves the parts can be added up.
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
    """Whether a whole tensor means the same to every slice along the dim at `place`, counted from the last."""
    if layout.learned and not layout.parameters:
        return False
    return layout.even or place in layout.even_dims or not spans(tensor, place)


def _along_last(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Softmax and the like, over the last dim."""
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
    """Add up or turn round along other dims."""
    axes, dim, rank = constant_value(op.inputs[1]), inputs[0].dim, op.inputs[0].shape.rank
    if axes is None or dim is None or dim in {int(axis) % rank for axis in axes.reshape(-1)}:
        return None
    return [joined(inputs[:1], dim)]


def _multiplied(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Products of matrices within sharded batch dims, such as heads; other dims would make parts of a sum."""
    if any(tensor.shape.rank is None for tensor in op.inputs):
        return None
    pairs = zip(op.inputs, inputs, strict=True)
    places = [layout.dim - tensor.shape.rank for tensor, layout in pairs if layout.dim is not None]
    if len(places) != 2 or places[0] != places[1] or places[0] > -3:
        return None
    return [joined(inputs, places[0] + op.outputs[0].shape.rank)]


def _einsum(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Products that keep the sharded label, which all factors have."""
    *terms, output = op.get_attr("equation").decode().replace(" ", "").replace("->", ",").split(",")
    if "..." in output or any(layout.dim is None for layout in inputs):
        return None
    labels = {term[layout.dim] for term, layout in zip(terms, inputs, strict=True)}
    label = labels.pop()
    return None if labels or label not in output else [joined(inputs, output.index(label))]


def _pooled(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Pool within each channel: windows along the sharded dim have one element."""
    dim = inputs[0].dim
    alone = dim is not None and op.get_attr("ksize")[dim] == op.get_attr("strides")[dim] == 1
    return [joined(inputs, dim)] if alone else None


def _resized(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Resize images [samples, height, width, channels] within each channel."""
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
