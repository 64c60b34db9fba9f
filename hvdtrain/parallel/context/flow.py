"""Propagate sequence shards through a model, and reject operations across positions.

Like `parallel/tensor/flow/check.py` for feature shards: the model is traced in full and sharded, and every operation
between known layers must compute each position independently. Gradients need no check: each rank's gradient covers its
own positions, and they are summed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.context.positions import POSITION_DIM
from hvdtrain.parallel.tensor.flow.check import place_of
from hvdtrain.parallel.tensor.flow.constants import UNSEEDED, RandomUse, of_constants
from hvdtrain.parallel.tensor.flow.operations import ELEMENTWISE, FILLED, OF_SHAPE, Layout, outputs_of
from hvdtrain.parallel.tensor.flow.trace import Trace, same_operations

WHOLE = Layout()
OWN_ATTENTION = "In attention of your own, call hvdtrain.DotProductAttention: it is given all positions."
"""Advice for a layer that attends by itself."""
_TAKE_SHAPES = ("Reshape", "BroadcastTo", "StridedSlice", "Slice", "Pack", "ConcatV2", *FILLED)
_RANDOM = ("Random", "StatelessRandom")
_ASSIGN = ("AssignVariableOp", "AssignAddVariableOp")


def follow(sliced: Trace, whole: Trace, ranks: int, variables: Mapping[str, Any]) -> RandomUse:
    """Verify that a model computes the same from sharded and full sequences.

    Args:
        sliced: trace with sequence shards.
        whole: trace of the same model with full sequences.

    Returns:
        Which random generators are used for shards, and which for replicated tensors.

    Raises:
        ConfigError: names the layer that looks at other positions, or at their number.
    """
    walk = _Walk(sliced, whole, variables)
    walk.go()
    if not same_operations(whole.operations, sliced.operations):
        raise ConfigError(
            "The model computes something else from a slice of a sequence than from all of it, as its code looks at "
            f"the length: leave cp out of {opt('parallel')}."
        )
    for mine, theirs in zip(sliced.operations, whole.operations, strict=True):
        _compare_constants(mine, theirs)
        for tensor, other in zip(mine.outputs, theirs.outputs, strict=True):
            _confirm(tensor, other, walk.layout_of(tensor), ranks)
    walk.check_outputs(ranks)
    walk.generators.check()
    return walk.generators


class _Walk:
    """Visits the operations of a trace in order."""

    def __init__(self, trace: Trace, whole: Trace, variables: Mapping[str, Any]) -> None:
        self._trace = trace
        self._whole = {id(mine): theirs for mine, theirs in zip(trace.operations, whole.operations, strict=False)}
        paths = {id(variable.handle): path for path, variable in variables.items()}
        self._paths = {id(inner): paths[id(outer)] for outer, inner in trace.graph.captures if id(outer) in paths}
        self.generators = RandomUse()
        self._layouts: dict[str, Layout] = {}
        self._lengths: set[str] = set()
        """Names of tensors computed from the length of a shard."""
        self._operations = list(trace.graph.get_operations())

    def layout_of(self, tensor: Any) -> Layout:
        return self._layouts.get(tensor.name, WHOLE)

    def go(self) -> None:
        calls = [call for call in self._trace.calls if call.begin < call.end]
        ends, begins = {call.end: call for call in calls}, {call.begin: call for call in calls}
        between = {id(op) for op in self._trace.operations}
        for place, op in enumerate([*self._operations, None]):
            if place in ends:
                self._leave(ends[place])
            if place in begins:
                self._arrive(begins[place])
            if op is not None and id(op) in between:
                self._pass(op)

    def _arrive(self, call: Any) -> None:
        """Check the inputs of a known layer: sharded, full, or either."""
        taken = {tensor.name: tensor.shape.rank + dim for tensor, dim in call.takes}
        passed = {tensor.name: moved for tensor, _, moved in call.passes}
        for op in self._operations[call.begin : call.end]:
            for tensor in op.inputs:
                if tensor.name not in self._layouts:
                    continue
                self.generators.use_replicated([self._layouts[tensor.name]])
                layout, dim = self._layouts[tensor.name], taken.get(tensor.name)
                if tensor.name in passed and (layout.dim is None or passed[tensor.name](layout.dim) is not None):
                    continue
                if layout.dim != dim:
                    raise ConfigError(_unlike(call.layer, layout, tensor, dim))

    def _leave(self, call: Any) -> None:
        given = {tensor.name: tensor.shape.rank + dim for tensor, dim in call.gives}
        for tensor, output, moved in call.passes:
            dim = self.layout_of(tensor).dim
            if dim is not None:
                given[output.name] = moved(dim)
        for op in self._operations[call.begin : call.end]:
            for output in op.outputs:
                self._layouts[output.name] = Layout(given.get(output.name), call.layer)

    def _pass(self, op: Any) -> None:
        inputs = [self.layout_of(tensor) for tensor in op.inputs]
        if any(layout.dim is not None for layout in inputs):
            outputs: Sequence[Layout] = self._of_slices(op, inputs)
        elif op.type == "ReadVariableOp":
            outputs = [self._read(op)]
        elif op.type != "Placeholder" and all(layout.constant for layout in inputs):
            outputs = [of_constants(op, inputs)] * len(op.outputs)
            self._note_length(op)
        else:
            outputs = [WHOLE] * len(op.outputs)
            self.generators.use_replicated([] if op.type in _ASSIGN else inputs)
        for tensor, layout in zip(op.outputs, outputs, strict=True):
            self._layouts[tensor.name] = layout

    def _read(self, op: Any) -> Layout:
        """Return the layout of a random generator's state, also valid for shards."""
        path = self._paths.get(id(op.inputs[0]), UNSEEDED)
        generator = bool(op.outputs[0].dtype.is_integer)
        return Layout(constant=generator, generators=frozenset([path] if generator else []))

    def _of_slices(self, op: Any, inputs: list[Layout]) -> Sequence[Layout]:
        outputs = outputs_of(op, inputs)
        if op.type in OF_SHAPE:
            self._lengths.update(tensor.name for tensor in op.outputs)
        counts = op.type in ELEMENTWISE and any(tensor.name in self._lengths for tensor in op.inputs)
        if outputs is None or counts:
            what = "computes with the length of the sequence" if counts else "looks at several positions"
            raise ConfigError(
                f"{place_of(op)} {what}, of which each rank along cp has a slice ({op.type}). Each position must be "
                "computed from itself alone, but for MultiHeadAttention and GroupQueryAttention: leave the layer out, "
                f"or cp in {opt('parallel')}. {OWN_ATTENTION}"
            )
        whole = self._whole.get(id(op))
        self.generators.use_on_shard(
            op, inputs, whole if whole is not None and whole.type == op.type else op, place_of(op)
        )
        return outputs

    def _note_length(self, op: Any) -> None:
        if op.type in _TAKE_SHAPES[:2] or op.type in FILLED or op.type.startswith(_RANDOM):
            return
        if any(tensor.name in self._lengths for tensor in op.inputs):
            self._lengths.update(tensor.name for tensor in op.outputs)

    def check_outputs(self, ranks: int) -> None:
        """Reject outputs that are not sharded by position. Raises ConfigError for an output of whole samples."""
        for tensor in self._trace.outputs:
            if self.layout_of(tensor).dim != POSITION_DIM:
                raise ConfigError(
                    f"cp={ranks} cuts sequences, and each output must have one value for each position, [batch, "
                    f"positions, …]. Received: an output of the shape {tuple(tensor.shape)} that is not sharded. Leave "
                    f"cp out of {opt('parallel')} for a model that puts sequences together."
                )


def _confirm(tensor: Any, whole: Any, layout: Layout, ranks: int) -> None:
    """Compare a tensor's shape with the one for full sequences."""
    if tensor.shape.rank is None or whole.shape.rank is None or layout.constant:
        return
    longer = [
        length * ranks if dim == layout.dim and length is not None else length
        for dim, length in enumerate(tensor.shape.as_list())
    ]
    if len(longer) == whole.shape.rank and all(
        None in pair or pair[0] == pair[1] for pair in zip(longer, whole.shape.as_list(), strict=True)
    ):
        return
    raise ConfigError(
        f"{place_of(tensor.op)} gives the shape {tuple(tensor.shape)} of a slice of a sequence, and "
        f"{tuple(whole.shape)} of all of it: it does not compute each position from itself alone. Leave the layer out, "
        f"or cp in {opt('parallel')}."
    )


def _compare_constants(mine: Any, theirs: Any) -> None:
    """Reject a constant computed from the sequence length at trace time."""
    if mine.type != "Const":
        return
    value, whole = (tf.get_static_value(op.outputs[0]) for op in (mine, theirs))
    if value is None or whole is None or value.tobytes() == whole.tobytes():
        return
    users = mine.outputs[0].consumers()
    if value.dtype.kind in "iu" and all(u.type in _TAKE_SHAPES or u.type.startswith(_RANDOM) for u in users):
        return
    place = place_of(users[0]) if users else place_of(mine)
    raise ConfigError(
        f"{place} computes with the length of the sequence, of which each rank along cp has a slice: {whole} for "
        f"all of it, and {value} for a slice. Leave the layer out, or cp in {opt('parallel')}."
    )


def _unlike(layer: str, layout: Layout, tensor: Any, place: int | None) -> str:
    shape = tuple(tensor.shape)
    if layout.dim is None:
        return (
            f"{layer} is given whole sequences of the shape {shape}, and exchanges slices along cp. Sequences are cut "
            "where an Embedding looks them up; for other inputs name the layer behind which they are cut: "
            'hvdtrain.parallelize(model, {"LAYER/output": (None, "cp", None)}).'
        )
    wanted = "whole sequences" if place is None else f"slices along dim {place}"
    return (
        f"{layer} needs {wanted}, and is given a slice along dim {layout.dim} of {shape} by {layout.origin}: it does "
        f"not compute each position from itself alone. Leave the layer out, or cp in {opt('parallel')}."
    )
