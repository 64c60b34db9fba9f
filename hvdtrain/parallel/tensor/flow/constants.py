"""What is computed from constants alone: masks, scales and noise that meet slices of activations."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.flow.draws import UNSEEDED
from hvdtrain.parallel.tensor.flow.layouts import Layout
from hvdtrain.parallel.tensor.flow.operations import ELEMENTWISE, FILLED

_DRAWN = ("StatelessRandom", "Random")
_OF_SEEDS = "StatelessRandomGet"


def of_constants(op: Any, inputs: Sequence[Layout]) -> Layout:
    """Return the layout of what `op` computes from constants alone."""
    draws = frozenset().union(*(layout.draws for layout in inputs))
    if op.type.startswith(_DRAWN) and not op.type.startswith(_OF_SEEDS) and not draws:
        draws = frozenset([UNSEEDED])  # from a state of TensorFlow's own, or a seed that never changes
    if op.type.startswith(_DRAWN) or op.type in FILLED:
        return Layout(constant=True, even=True, draws=draws)
    if inputs and op.type in ELEMENTWISE:
        even = all(layout.even for layout in inputs)
        return Layout(constant=True, even=even, even_dims=_even_dims(op, inputs), draws=draws)
    return Layout(constant=True, even=op.type == "Const" and _of_one_value(op.outputs[0]), draws=draws)


def _even_dims(op: Any, inputs: Sequence[Layout]) -> frozenset[int]:
    """Return the dims, counted from the last, along which an operation on each element gives the same everywhere."""
    rank = op.outputs[0].shape.rank
    return frozenset(
        dim
        for dim in range(-(rank or 0), 0)
        if all(_is_even(tensor, layout, dim) for tensor, layout in zip(op.inputs, inputs, strict=True))
    )


def _is_even(tensor: Any, layout: Layout, dim: int) -> bool:
    rank = tensor.shape.rank
    return layout.even or dim in layout.even_dims or (rank is not None and (rank < -dim or tensor.shape[dim] == 1))


def _of_one_value(tensor: Any) -> bool:
    value = tf.get_static_value(tensor)
    return value is not None and (value.size <= 1 or bool((value == value.flat[0]).all()))


def compare_numbers(mine: Any, theirs: Any, place: str) -> None:
    """Refuse a number that the model computes with and that was made from the size of a slice.

    Args:
        mine: an operation between the layers that hold slices.
        theirs: the same one in the whole model.
        place: of the operation, for the message.

    Raises:
        ConfigError: naming both numbers.
    """
    if mine.type not in ("Const", "Cast") or not mine.outputs[0].dtype.is_floating:
        return
    value, whole = (_number(op.outputs[0] if op.type == "Const" else op.inputs[0]) for op in (mine, theirs))
    if value is None or whole is None or value.shape != whole.shape or value.tobytes() == whole.tobytes():
        return
    raise ConfigError(
        f"{place} computes with a size of which each rank along tp has a part: {whole} of the whole, and {value} of a "
        "slice. Take that number from the configuration of the layer, or leave the layer before it whole."
    )


def _number(tensor: Any) -> Any:
    """Return what is known of a constant, also of one element of a shape."""
    if tensor.op.type != "StridedSlice" or tensor.shape.rank != 0 or tensor.op.inputs[0].shape.rank != 1:
        return tf.get_static_value(tensor)
    shape, place = (tf.get_static_value(each) for each in tensor.op.inputs[:2])
    return None if shape is None or place is None else shape[int(place[0])]
