"""What TensorFlow's operations do with a sharded dim that has blocks side by side, such as query, key and value.

A rank holds its slice of each block. Operations on each element keep the blocks, and so do those on other dims; what
takes one block of them, by a split or an index, gives a plain slice. None stands for everything else.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.parallel.tensor.flow.layouts import Layout, joined
from hvdtrain.parallel.tensor.flow.moves import indexed
from hvdtrain.parallel.tensor.flow.operations import ELEMENTWISE, OF_SHAPE, outputs_of

KEEP = frozenset(("Transpose", "ExpandDims"))
"""Operations that move the sharded dim, or leave it where it is."""


def outputs_of_blocks(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Return the layouts of the outputs of `op`, some of whose inputs have blocks; None if it mixes them.

    Args:
        op: the operation on slices.
        inputs: layouts of its inputs.
        whole: the same operation in the whole model; None where there is none.
    """
    if op.type in OF_SHAPE or op.type in ("Identity", "IdentityN"):
        return outputs_of(op, inputs)
    if op.type in ELEMENTWISE or op.type in KEEP:
        return _kept(op, inputs)
    rule = RULES.get(op.type)
    return None if rule is None or whole is None else rule(op, inputs, whole)


def _kept(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Keep the blocks, which all sharded inputs must have alike."""
    blocks = {layout.blocks for layout in inputs if layout.dim is not None}
    outputs = outputs_of(op, inputs)
    if len(blocks) != 1 or outputs is None:
        return None
    return [replace(layout, blocks=next(iter(blocks))) for layout in outputs]


def _split(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Cut into the blocks, or along another dim; the axis comes first of `Split`, and last of `SplitV`."""
    place, last = (1, 0) if op.type == "Split" else (0, 2)
    axis, layout = tf.get_static_value(op.inputs[last]), inputs[place]
    if axis is None or layout.dim is None:
        return None
    if int(axis) % op.inputs[place].shape.rank != layout.dim:
        return [layout] * len(op.outputs)
    lengths = tuple(output.shape[layout.dim] for output in op.outputs)
    return [joined([layout], layout.dim)] * len(op.outputs) if lengths == layout.blocks else None


def _indexed(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Take one block by Python's indexing, or all of them."""
    found = indexed(op, inputs[0].dim)
    if found is None:
        return None
    dim, bounds = found
    if bounds is None:
        return [replace(joined(inputs[:1], dim), blocks=inputs[0].blocks)]
    return [joined(inputs[:1], dim)] if bounds in _bounds(inputs[0].blocks) else None


def _sliced(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Take one block by `tf.slice`, or all of them."""
    begin, size = (tf.get_static_value(tensor) for tensor in op.inputs[1:])
    layout, length = inputs[0], op.outputs[0].shape[inputs[0].dim]
    if begin is None or size is None or layout.dim is None or length is None:
        return None
    if length == sum(layout.blocks):
        return [layout]
    first = int(begin[layout.dim])
    return [joined([layout], layout.dim)] if (first, first + length) in _bounds(layout.blocks) else None


def _bounds(blocks: Sequence[int]) -> list[tuple[int, int]]:
    ends = [sum(blocks[: place + 1]) for place in range(len(blocks))]
    return [(end - block, end) for end, block in zip(ends, blocks, strict=True)]


def _reshaped(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Split the dim into one for the blocks and others, or into heads that no two blocks share."""
    layout, before, after = inputs[0], op.inputs[0].shape, op.outputs[0].shape
    there = whole.outputs[0].shape
    if layout.dim is None or None in (before.rank, after.rank) or there.rank != after.rank:
        return None
    dim, blocks = layout.dim, layout.blocks
    front, rest = after.as_list()[:dim], after.as_list()[dim:]
    # Several dims of unknown length, or dims behind the sharded one, would say nothing of what is merged with what.
    if front != before.as_list()[:dim] or front.count(None) > 1 or dim != before.rank - 1 or None in rest or not rest:
        return None
    behind = sum(blocks) // rest[0]
    changed = [place for place in range(dim, after.rank) if after[place] != there[place]]
    if changed == [dim] and all(block % behind == 0 for block in blocks):
        return [replace(joined([layout], dim), blocks=tuple(block // behind for block in blocks))]
    if changed == [dim + 1] and rest[0] == len(blocks) and len(set(blocks)) == 1:
        return [joined([layout], dim + 1)]
    return None


RULES: dict[str, Callable[[Any, Sequence[Layout], Any], Sequence[Layout] | None]] = {
    "Reshape": _reshaped,
    "Slice": _sliced,
    "Split": _split,
    "SplitV": _split,
    "StridedSlice": _indexed,
}
