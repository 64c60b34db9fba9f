"""Propagate sharded activations through a model, and reject changed results.

The model is traced twice, full and sharded. Between sharded layers both run the same operations. A sharded dim of a
layer's output survives elementwise operations, attention over heads, and reshapes; it must reach a layer that takes it
sharded, or be an output of the model. Any other operation on it is rejected. The dims are verified by the shapes of the
full model: each sharded dim must have this rank's length, and no other dim may differ.

A sharded dim may consist of fused blocks, such as query, key and value, with a shard of each. Elementwise operations
and those on other dims keep the blocks; a split or an index that takes one block yields a plain shard.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.flow.constants import UNSEEDED, RandomUse, compare_numbers, even_dims, of_constants
from hvdtrain.parallel.tensor.flow.operations import (
    ELEMENTWISE,
    OF_SHAPE,
    Layout,
    indexed,
    joined,
    outputs_of,
    reshaped_like,
)
from hvdtrain.parallel.tensor.flow.trace import BY_OUTPUT_RULE, Trace, same_operations, shown
from hvdtrain.runtime.placement import even_slice

KEEP = frozenset(("Transpose", "ExpandDims"))
"""Operations that move the sharded dim, or leave it in place."""


def outputs_of_blocks(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Return output layouts for fused inputs, or None if `op` mixes them."""
    if op.type in OF_SHAPE or op.type in ("Identity", "IdentityN"):
        return outputs_of(op, inputs)
    if op.type in ELEMENTWISE or op.type in KEEP:
        return _kept(op, inputs)
    rule = RULES.get(op.type)
    return None if rule is None or whole is None else rule(op, inputs, whole)


def _kept(op: Any, inputs: Sequence[Layout]) -> Sequence[Layout] | None:
    """Keep the blocks, which all sharded inputs must share."""
    blocks = {layout.blocks for layout in inputs if layout.dim is not None}
    outputs = outputs_of(op, inputs)
    if len(blocks) != 1 or outputs is None:
        return None
    return [replace(layout, blocks=next(iter(blocks))) for layout in outputs]


def _split(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Split into the blocks, or along another dim; the axis is the first input of `Split`, the last of `SplitV`."""
    place, last = (1, 0) if op.type == "Split" else (0, 2)
    axis, layout = tf.get_static_value(op.inputs[last]), inputs[place]
    if axis is None or layout.dim is None:
        return None
    if int(axis) % op.inputs[place].shape.rank != layout.dim:
        return [layout] * len(op.outputs)
    lengths = tuple(output.shape[layout.dim] for output in op.outputs)
    return [joined([layout], layout.dim)] * len(op.outputs) if lengths == layout.blocks else None


def _indexed(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Take one block, or all, by Python indexing."""
    found = indexed(op, inputs[0].dim)
    if found is None:
        return None
    dim, bounds = found
    if bounds is None:
        return [replace(joined(inputs[:1], dim), blocks=inputs[0].blocks)]
    return [joined(inputs[:1], dim)] if bounds in _bounds(inputs[0].blocks) else None


def _sliced(op: Any, inputs: Sequence[Layout], whole: Any) -> Sequence[Layout] | None:
    """Take one block, or all, by `tf.slice`."""
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
    """Split the dim into blocks, or into heads inside one block."""
    layout, before, after = inputs[0], op.inputs[0].shape, op.outputs[0].shape
    there = whole.outputs[0].shape
    if layout.dim is None or None in (before.rank, after.rank) or there.rank != after.rank:
        return None
    dim, blocks = layout.dim, layout.blocks
    front, rest = after.as_list()[:dim], after.as_list()[dim:]
    # With several dynamic dims, or dims after the sharded one, the merged dims are ambiguous.
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


UNKNOWN = Layout()
SIZES = "Take sizes such as the number of heads from the activation's shape, or write -1 for them"
"""Advice for code that uses sizes of a sharded dim."""
APART = "Take the blocks apart first, such as by keras.ops.split(x, 3, axis=-1) where there are three of one size."


@dataclass
class Flow:
    """Layouts of a model's activations."""

    outputs: list[Layout] = field(default_factory=list)
    """Layouts of the model's outputs."""
    partial: set[str] = field(default_factory=set)
    """Paths of full variables whose gradients are partial on each rank."""
    whole: set[str] = field(default_factory=set)
    """Paths of full variables whose gradients are complete on each rank."""
    generators: RandomUse = field(default_factory=RandomUse)


def follow(
    sliced: Trace, whole: Trace, ranks: int, index: int, variables: Mapping[str, Any], cut: frozenset[str]
) -> Flow:
    """Return the layouts of a model's activations.

    Raises ConfigError naming the layer that receives a sharded activation it cannot use.
    """
    walk = _Walk(sliced, whole, variables, cut)
    walk.go()
    if not same_operations(whole.operations, sliced.operations):
        raise ConfigError(
            "The model computes something else from slices than from whole activations, as its code looks at their "
            "shapes. Leave those layers whole."
        )
    for mine, theirs in zip(sliced.operations, whole.operations, strict=True):
        compare_numbers(mine, theirs, place_of(mine))
        for tensor, other in zip(mine.outputs, theirs.outputs, strict=True):
            _confirm(tensor, whole=other, layout=walk.layout_of(tensor), ranks=ranks, index=index)
    return walk.result()


class _Walk:
    """Visits the operations of a trace in order."""

    def __init__(self, trace: Trace, whole: Trace, variables: Mapping[str, Any], cut: frozenset[str]) -> None:
        self._trace = trace
        pairs = zip(trace.operations, whole.operations, strict=False)
        self._whole = {id(mine): theirs for mine, theirs in pairs if mine.type == theirs.type}
        """Corresponding operation of the full model; verified later."""
        self._cut = cut
        self._layouts: dict[int, Layout] = {}
        self._kept = list(trace.graph.get_operations())
        handles = {id(variable.handle): (path, variable) for path, variable in variables.items()}
        self._variables = {
            id(inner): handles[id(outer)] for outer, inner in trace.graph.captures if id(outer) in handles
        }
        self._flow = Flow()

    def layout_of(self, tensor: Any) -> Layout:
        return self._layouts.get(tensor.name, UNKNOWN)

    def go(self) -> None:
        ends = {call.end: call for call in self._trace.calls}
        begins = {call.begin: call for call in self._trace.calls}
        between = {id(op) for op in self._trace.operations}
        for place, op in enumerate([*self._kept, None]):
            if place in ends:
                self._leave(ends[place])
            if place in begins:
                self._arrive(begins[place])
            if op is not None and id(op) in between:
                self._pass(op)

    def _arrive(self, call: Any) -> None:
        """Check that a sharded layer's inputs have the layout it expects."""
        taken = dict((tensor.name, dim) for tensor, dim in call.takes)
        for op in self._kept[call.begin : call.end]:
            for tensor in op.inputs:
                layout = self.layout_of(tensor)
                dim = taken.get(tensor.name)
                place = None if dim is None else tensor.shape.rank + dim
                if layout.dim != place and tensor.name in self._layouts:
                    raise ConfigError(_unlike(call.layer, layout, tensor, place))
                if layout.blocks:
                    raise ConfigError(_not_apart(call.layer, layout))
                self._used_whole(layout)

    def _leave(self, call: Any) -> None:
        given = {tensor.name: tensor.shape.rank + dim for tensor, dim in call.gives}
        for op in self._kept[call.begin : call.end]:
            for tensor in op.outputs:
                blocks = call.blocks if tensor.name in given else ()
                self._layouts[tensor.name] = Layout(given.get(tensor.name), call.layer, learned=True, blocks=blocks)

    def _pass(self, op: Any) -> None:
        inputs = [self.layout_of(tensor) for tensor in op.inputs]
        if any(id(tensor) in self._variables for tensor in op.inputs):
            outputs: Sequence[Layout] = self._read(op)
        elif op.type == "ReadVariableOp" and op.outputs[0].dtype.is_integer:
            outputs = [Layout(constant=True, generators=frozenset([UNSEEDED]))]  # as of Keras' global generator
        elif any(layout.dim is not None for layout in inputs):
            outputs = self._sharded(op, inputs)
        else:
            layout = self._of_whole(op, inputs)
            # Integers and booleans, such as masks that are made for an activation's shape, pass no gradient on.
            outputs = [
                layout
                if layout.constant or tensor.dtype.is_floating or tensor.dtype.is_complex
                else Layout(even_dims=layout.even_dims)
                for tensor in op.outputs
            ]
        for tensor, layout in zip(op.outputs, outputs, strict=True):
            self._layouts[tensor.name] = layout

    def _read(self, op: Any) -> list[Layout]:
        path, variable = next(self._variables[id(t)] for t in op.inputs if id(t) in self._variables)
        if path in self._cut:
            raise ConfigError(
                f"{place_of(op)} reads {path!r}, of which each rank has a slice, outside of the layer that holds it. "
                "Tie an output to an embedding with keras.layers.ReversibleEmbedding, or leave the variable whole."
            )
        if not variable.trainable:
            drawn = frozenset([path]) if variable.dtype.is_integer else frozenset()
            return [Layout(constant=variable.dtype.is_integer, generators=drawn)] * len(op.outputs)
        return [Layout(learned=True, parameters=frozenset([path]))] * len(op.outputs)

    def _sharded(self, op: Any, inputs: list[Layout]) -> Sequence[Layout]:
        whole = self._whole.get(id(op))
        if any(layout.blocks for layout in inputs):
            outputs = outputs_of_blocks(op, inputs, whole)
        elif op.type == "Reshape":
            outputs = reshaped_like(op, inputs, whole)
        else:
            outputs = outputs_of(op, inputs)
        if outputs is None:
            raise ConfigError(_unknown(op, next(layout for layout in inputs if layout.dim is not None)))
        for layout in inputs:
            self._flow.partial |= layout.parameters
        self._flow.generators.use_on_shard(op, inputs, whole or op, place_of(op))
        return outputs

    def _of_whole(self, op: Any, inputs: list[Layout]) -> Layout:
        if all(layout.constant for layout in inputs) and op.type != "Placeholder":
            return of_constants(op, inputs)
        parameters = frozenset().union(*(layout.parameters for layout in inputs))
        if parameters and all(layout.constant or layout.parameters for layout in inputs):
            self._flow.generators.use_replicated(inputs)
            return Layout(learned=True, parameters=parameters)
        for layout in inputs:
            self._used_whole(layout)
        even = even_dims(op, inputs) if op.type in ELEMENTWISE else frozenset()
        return Layout(learned=any(layout.learned for layout in inputs), even_dims=even)

    def _used_whole(self, layout: Layout) -> None:
        self._flow.whole |= layout.parameters
        self._flow.generators.use_replicated([layout])

    def _use_losses(self) -> None:
        """Treat losses added by layers as full on every rank."""
        for layer, loss in self._trace.losses:
            layout = self.layout_of(loss)
            if layout.dim is not None:
                raise ConfigError(
                    f"{type(layer).__name__} {layer.path!r} adds a loss of which each rank has a slice, by "
                    f"{layout.origin}: add what is whole, or leave the layer before it whole."
                )
            self._used_whole(layout)

    def result(self) -> Flow:
        self._flow.outputs = [self.layout_of(tensor) for tensor in self._trace.outputs]
        self._use_losses()
        self._flow.generators.check()
        both = sorted(self._flow.partial & self._flow.whole)
        if both:
            raise ConfigError(
                f"The variable {both[0]!r} is used on slices and on whole activations, and a rank has a part of the "
                "one gradient and all of the other. Use a variable for each."
            )
        for layout, tensor in zip(self._flow.outputs, self._trace.outputs, strict=True):
            self._used_whole(layout)
            if layout.dim not in (None, tensor.shape.rank - 1):
                raise ConfigError(f"An output of the model is a slice along dim {layout.dim}: {layout.origin} made it.")
            if layout.blocks:
                raise ConfigError(_not_apart("The model's caller", layout))
        return self._flow


def _confirm(tensor: Any, whole: Any, layout: Layout, ranks: int, index: int) -> None:
    """Compare a tensor's shape with the one in the full model."""
    if tensor.shape.rank is None or whole.shape.rank is None:
        return
    rank = tensor.shape.rank

    def fits(dim: int, mine: int | None, theirs: int | None) -> bool:
        if mine is None or theirs is None:
            return True
        part = _length_of_slice(theirs, ranks, index)
        return mine == (part if dim == layout.dim else theirs) or (dim - rank in layout.even_dims and mine == part)

    pairs = zip(range(rank), tensor.shape.as_list(), whole.shape.as_list(), strict=False)
    if layout.constant or (rank == whole.shape.rank and all(fits(*each) for each in pairs)):
        return
    raise ConfigError(
        f"{place_of(tensor.op)} gives the shape {shown(tensor.shape)} where each rank has a slice of its input, and "
        f"{shown(whole.shape)} of the whole, which is no slice along one dim. {SIZES}, or leave the layer before it "
        "whole."
    )


def _length_of_slice(length: int, ranks: int, index: int) -> int:
    own = even_slice(length, ranks, index)
    return own.stop - own.start


def _unknown(op: Any, layout: Layout) -> str:
    """Return the message for an operation that cannot run on a shard."""
    if layout.blocks:
        return (
            f"{place_of(op)} mixes blocks of the output of {layout.origin}, of each of which a rank has a slice "
            f"({op.type}). {APART} {SIZES}."
        )
    advice = f"{SIZES}, cut" if op.type == "Reshape" else "Cut"
    advice = f"{advice} a layer between them along its input"
    if layout.origin.endswith(BY_OUTPUT_RULE):
        advice = 'Put the sequence together before, by a rule "LAYER/output": (None, None, None)'
    return (
        f"{place_of(op)} needs the whole output of {layout.origin}, of which each rank has a slice ({op.type}). "
        f"{advice}, or leave the first one whole."
    )


def _not_apart(taker: str, layout: Layout) -> str:
    return (
        f"{taker} is given the output of {layout.origin}, which has {len(layout.blocks)} blocks side by side. {APART}"
    )


def _unlike(layer: str, layout: Layout, tensor: Any, place: int | None) -> str:
    if layout.dim is None:
        return (
            f"{layer} is cut along its input, and is given a whole activation of the shape {shown(tensor.shape)}: cut "
            "the layer before it along its output, or this one not along its input."
        )
    wanted = "whole" if place is None else f"sharded along dim {place}"
    return (
        f"{layer} needs its input {wanted}, and is given a slice along dim {layout.dim} by {layout.origin}. Cut a "
        "layer between them along its input, or leave the first one whole."
    )


def place_of(op: Any) -> str:
    """Return the layer whose scope contains an operation, or the operation."""
    scope = op.name.rpartition("/")[0]
    return f"The layer {scope!r}" if scope else f"The operation {op.name!r} of the model"
