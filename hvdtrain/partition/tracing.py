"""Applies the rules to the operations of a step as it is traced."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from hvdtrain.compat.seams import FUNCTION, GRADIENT, TAPE
from hvdtrain.compat.tensorflow import (
    Standing,
    assertions_without_branches,
    converted_function,
    operations_made_by,
    shapes_read_as,
)
from hvdtrain.config.errors import ConfigError
from hvdtrain.partition.kinds import Opaque, Part, Rows, Sizes, Slice
from hvdtrain.partition.partition import IN_GRAPH, Partition
from hvdtrain.partition.rules import Call, Finished, Outputs, of_slices, opaque, whole
from hvdtrain.partition.sizes import followed, values_of
from hvdtrain.partition.table import RULES
from hvdtrain.partition.units import within_units
from hvdtrain.runtime.users_frames import users_line

_CALLS_PYTHON = ("PyFunc", "PyFuncStateless", "EagerPyFunc")
_ASSIGN = ("AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp")


class CallsPython(ConfigError):
    """A Python function is given samples, of which each rank has its own."""


class StepExchanges(Exception):
    """Raised where a step calls Horovod's collectives by itself.

    Args:
        place: the line, `file:number`.
    """

    def __init__(self, place: str, *more: object) -> None:
        super().__init__(place, *more)
        self.place = place


@contextmanager
def traced(partition: Partition, *, sums: Collection[tf.Variable] = ()) -> Iterator[None]:
    """Look at the operations that are made inside the context, in this thread.

    Args:
        partition: notes how this rank holds the tensors.
        sums: variables of which each rank holds its part of a sum, such as those of metrics. All others are whole.
    """
    for variable in sums:
        partition.mark(variable.handle, Part())

    def make(original: Callable[..., Any], graph: Any, op_type: str, inputs: Any, *args: Any, **options: Any) -> Any:
        if partition.is_plain:
            return original(graph, op_type, inputs, *args, **options)
        # A branch or a loop takes whole tensors, of which its operations are made, rather than the rows outside of it.
        taken = [each if getattr(each, "graph", graph) is graph else graph.capture(each) for each in inputs]
        return _made(partition, partial(original, graph), op_type, inputs=taken, args=args, options=options)

    def capture(original: Callable[..., Any], graph: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        if partition.is_plain or not partition.knows([tensor]) or getattr(tensor, "graph", None) is graph:
            return original(graph, tensor, *args, **options)
        kind = partition.kind(tensor)
        if tensor.dtype == tf.resource or isinstance(kind, Opaque):
            return partition.mark(original(graph, tensor, *args, **options), kind)
        if isinstance(kind, Sizes):
            # Inside, all tensors are whole: nothing has this rank's rows, whatever its shape.
            inner = replace(
                kind, local=False, entries=tuple(each if isinstance(each, int) else None for each in kind.entries)
            )
            return partition.mark(original(graph, partition.whole(tensor), *args, **options), inner)
        partition.cause = "a branch or a loop"
        return original(graph, partition.whole(tensor), *args, **options)

    gradient = GRADIENT.active(tf.GradientTape)
    enter = TAPE.active(tf.GradientTape)

    def entered(tape: Any) -> Any:
        partition.forget_conversions()
        return enter(tape)

    def differentiated(tape: Any, *args: Any, **options: Any) -> Any:
        found = gradient(tape, *args, **options)
        if not partition.is_plain:
            for each in tf.nest.flatten(found):
                _settle_gradient(partition, each)
        return found

    graph = tf.compat.v1.get_default_graph()
    graph.add_to_collection(IN_GRAPH, partition)
    function = type(tf.function(lambda: None))

    def inlined(called: Any, *args: Any, **options: Any) -> Any:
        return converted_function(called)(*args, **options)

    with (
        FUNCTION.replaced(function, inlined),
        operations_made_by(make, capture),
        GRADIENT.replaced(tf.GradientTape, differentiated),
        TAPE.replaced(tf.GradientTape, entered),
        within_units(partition),
        assertions_without_branches(),
        shapes_read_as(partition.read_shape),
    ):
        try:
            yield
        except (TypeError, ValueError) as error:
            if not partition.unknown or isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{partition.unknown} reads a number of samples that is not known while the step is traced: write "
                f"tf.shape(x)[0] or keras.ops.shape(x)[0] in place of x.shape[0]. Without it, {error}"
            ) from error
        finally:
            graph.get_collection_ref(IN_GRAPH).clear()


def _made(
    partition: Partition, original: Callable[..., Any], op_type: str, *, inputs: list[Any], args: Any, options: Any
) -> Any:
    """Make an operation by its rule."""
    if op_type.startswith("Horovod") and not any(isinstance(partition.kind(each), Opaque) for each in inputs):
        raise StepExchanges(users_line())  # a unit's own are part of it, such as those of SyncBatchNormalization
    if not partition.knows(inputs):
        op = original(op_type, inputs, *args, **options)
        _follow(partition, op, inputs, options)
        return op
    attrs = options.get("attrs") or (args[3] if len(args) > 3 else None) or {}
    partition.cause = op_type
    call = Call(partition, op_type, inputs, attrs)
    if any(isinstance(partition.kind(each), Opaque) for each in inputs):
        made: Any = opaque(call)
    elif any(isinstance(partition.kind(each), Slice) for each in inputs):
        made = of_slices(call)
    elif inputs and inputs[0].dtype == tf.resource and op_type in _ON_VARIABLES:
        made = _on_variable(call)
    elif op_type in _CALLS_PYTHON and any(isinstance(kind, Rows | Part) for kind in call.kinds):
        raise CallsPython(
            f"A Python function (tf.py_function or tf.numpy_function, at {users_line()}) is given samples of the "
            "batch, of which each rank has its own: it would be called for all of them on every rank. Call it in the "
            "dataset's map(), or pass whole_batch=False, by which each rank's step is computed for its own samples."
        )
    else:
        made = RULES.get(op_type, whole)(call)
    if isinstance(made, Outputs):
        for output, kind in zip(made.tensors, made.kinds, strict=True):
            partition.mark(output, kind)
        return Standing(op_type, call.inputs, made.tensors, attrs)
    if isinstance(made, Finished):
        op = original(op_type, made.inputs, *args, **options)
        return Standing(op_type, [], made.outputs(op), attrs)
    inputs, kinds = made
    op = original(op_type, inputs, *args, **options)
    if op_type == "Reshape":
        _set_shape(partition, op.outputs[0], kinds, inputs[1])
    if op_type == "Tile":
        _set_tiled(partition, op.outputs[0], *call.inputs)
    for output, kind in zip(op.outputs, kinds, strict=False):
        partition.mark(output, kind)
    if not kinds:
        _follow(partition, op, inputs, options)
    return op


def _set_shape(partition: Partition, output: tf.Tensor, kinds: list[Any], target: tf.Tensor) -> None:
    """Set the sizes that are known of a reshaped tensor, which TensorFlow does not follow as far."""
    known = values_of(partition, target)
    if known is not None and not (kinds and isinstance(kinds[0], Rows)):
        output.set_shape([each if isinstance(each, int) and each >= 0 else None for each in known.entries])


def _set_tiled(partition: Partition, output: tf.Tensor, tensor: tf.Tensor, counts: tf.Tensor) -> None:
    """Set the sizes that are known of a repeated tensor, such as the gradient of a sum."""
    known = values_of(partition, counts)
    if known is not None and tensor.shape.rank is not None:
        sizes = zip(tensor.shape, known.entries, strict=True)
        output.set_shape(
            [size * count if size is not None and isinstance(count, int) else None for size, count in sizes]
        )


def _follow(partition: Partition, op: Any, inputs: list[Any], options: Any) -> None:
    """Note what is known of the integers that an operation makes of others."""
    outputs = op.outputs
    if len(outputs) == 1 and outputs[0].dtype.is_integer and outputs[0].shape.rank in (0, 1, 2):
        found = followed(partition, op.type, inputs, options.get("attrs") or {})
        if found is not None:
            partition.mark(outputs[0], found)


_ON_VARIABLES = (*_ASSIGN, "ReadVariableOp", "ResourceScatterAdd", "ResourceScatterSub", "VariableShape")


def _on_variable(call: Call) -> Any:
    """Read or change a variable, which is whole, or of which each rank holds its part."""
    p = call.partition
    handle, *values = call.inputs
    is_sum = isinstance(p.kind(handle), Part)
    if not is_sum:
        return [handle, *map(p.whole, values)], []
    if call.type == "ReadVariableOp":
        return [handle], [Part()]
    if call.type in ("ResourceScatterAdd", "ResourceScatterSub"):
        return [handle, p.whole(values[0]), p.part(values[1])], []
    return [handle, *map(p.part, values)], []


def _settle_gradient(partition: Partition, gradient: Any) -> None:
    """Note that what a unit computed for its weights is a part of a sum."""
    for each in (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else (gradient,):
        if isinstance(partition.kind(each), Opaque):
            partition.mark(each, Rows() if isinstance(gradient, tf.IndexedSlices) else Part())
