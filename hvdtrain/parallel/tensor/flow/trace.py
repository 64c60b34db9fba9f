"""Trace a model: operations between sharded layers, and those layers' inputs and outputs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import clear_losses, flatten_layers, input_nest, losses_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.outputs import OutputShards, kept_outputs
from hvdtrain.runtime.turns import ops_of_turns

BY_OUTPUT_RULE = " (by its output rule)"
"""Suffix of a layer's name if only its output is sharded, not its computation."""


@dataclass
class LayerCall:
    """One call of a sharded layer within a trace."""

    layer: str
    """Kind and path of the layer."""
    begin: int
    """Number of operations in the graph before the call."""
    end: int = 0
    """Number of operations after it."""
    takes: list[tuple[Any, int]] = field(default_factory=list)
    """Inputs that must be sharded, with the dim counted from the last (-1)."""
    gives: list[tuple[Any, int]] = field(default_factory=list)
    """Outputs that are sharded, with the dim counted from the last."""
    blocks: tuple[int, ...] = ()
    """Local lengths of the fused blocks of the output's sharded dim; empty for a plain shard."""
    passes: list[tuple[Any, Any, Callable[[int], int | None]]] = field(default_factory=list)
    """(input, output, mapping of the input's sharded dim to the output's; None if it must be full)."""


@dataclass
class FlowRecord:
    """Layer calls of one trace; records only while `graph` is set."""

    graph: Any = None
    calls: list[LayerCall] = field(default_factory=list)
    _open: LayerCall | None = None

    @contextmanager
    def call(self, layer: str) -> Iterator[LayerCall]:
        """Record a layer's call, including its inner layers."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        call = LayerCall(layer, _operations(graph))
        if self.graph is None or self._open is not None:
            yield call
            return
        if graph is not self.graph:
            raise ConfigError(
                f"{layer} is split among ranks and is called within a loop, a branch or a tf.function of the model, "
                "where its output cannot be followed. Call it outside of these, or leave it whole."
            )
        self._open = call
        try:
            yield call
        finally:
            self._open = None
        call.end = _operations(graph)
        self.calls.append(call)

    @contextmanager
    def of(self, graph: Any) -> Iterator[None]:
        """Record calls while `graph` is traced."""
        self.graph, self.calls = graph, []
        try:
            yield
        finally:
            self.graph = None


def _operations(graph: Any) -> int:
    return 0 if graph is None else len(graph.get_operations())


TRACED_BATCH = 7
"""Batch size for building and tracing: unlikely to equal a weight's dim."""


def built(model: Any, inputs: Any) -> Any:
    """Return `model`, or the model it builds, with its variables created.

    Uses a fixed batch size: with a dynamic one, a layer after a reshape to (batch, length, -1) could not infer its
    width.
    """
    made = model if isinstance(model, keras.Model) else model()
    if inputs is not None and isinstance(made, keras.Model) and not made.built:
        made(tf.nest.map_structure(lambda t: keras.KerasTensor((TRACED_BATCH, *t.shape[1:]), _dtype(t)), inputs))
    return made


def _dtype(tensor: Any) -> str:
    return str(tf.as_dtype(tensor.dtype).name)


def input_specs(model: Any, inputs: Any) -> Any:
    """Return the shapes and dtypes of a model's inputs. Raises ConfigError if they are unknown."""
    if inputs is not None:
        return tf.nest.map_structure(spec_of_input, inputs)
    specs = symbolic_inputs(model)
    if specs is None:
        raise ConfigError(
            f"{type(model).__name__} {model.name!r} does not tell what it is called with, and its activations cannot "
            "be followed: give parallelize the shapes of a batch too, inputs=x[:1]."
        )
    return specs


def symbolic_inputs(model: Any) -> Any:
    """Return the specs of a Functional or Sequential model's inputs, else None."""
    if isinstance(model, keras.Sequential):
        inputs = model.inputs[0] if model.built and model.inputs else None
    else:
        inputs = input_nest(model)
    return None if inputs is None else tf.nest.map_structure(spec_of_input, inputs)


def spec_of_input(tensor: Any) -> tf.TensorSpec:
    """Return an input's shape and dtype with a dynamic batch size."""
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


@dataclass(frozen=True)
class Trace:
    """A model's operations in creation order, and its calls of sharded layers."""

    graph: Any
    operations: list[Any]
    """Operations outside of the calls."""
    calls: list[LayerCall]
    outputs: list[Any]
    inputs: list[Any]
    losses: list[tuple[Any, Any]]
    """Losses added by layers, each with its layer."""


def traced(model: Any, inputs: Any, record: FlowRecord, *, training: bool) -> Trace:
    """Trace `model` on shapes and dtypes, in training mode or not."""
    graph = tf.__internal__.FuncGraph("layouts")
    with graph.as_default(), record.of(graph):
        given = tf.nest.map_structure(lambda t: tf.compat.v1.placeholder(t.dtype, t.shape), inputs)
        outputs = kept_outputs(OutputShards, model, model, given, training=training)
    layers = {id(layer): layer for layer in flatten_layers(model) if isinstance(layer, keras.Layer)}.values()
    losses = [(layer, loss) for layer, loss in losses_of(layers) if getattr(loss, "graph", None) is graph]
    clear_losses(model)
    inside = {place for call in record.calls for place in range(call.begin, call.end)}
    # Made where the first collective is: of slices within a call, of whole activations outside.
    turns = ops_of_turns(graph)
    ops = enumerate(graph.get_operations())
    operations = [op for place, op in ops if place not in inside and op.name not in turns]
    flat = [tensor for tensor in tf.nest.flatten(outputs) if tf.is_tensor(tensor)]
    return Trace(
        graph=graph,
        operations=operations,
        calls=list(record.calls),
        outputs=flat,
        inputs=tf.nest.flatten(given),
        losses=losses,
    )


def of_one_size(specs: Any) -> Any:
    """Return specs with a fixed batch size, for fully known dims."""

    def sized(spec: Any) -> Any:
        free = spec.shape.rank and spec.shape[0] is None
        return tf.TensorSpec([TRACED_BATCH, *spec.shape[1:]], spec.dtype) if free else spec

    return tf.nest.map_structure(sized, specs)


def shown(shape: tf.TensorShape) -> tuple[int | None, ...]:
    """Return an activation's shape for messages, with a dynamic batch size."""
    return tuple(None if dim == 0 and n == TRACED_BATCH else n for dim, n in enumerate(shape.as_list()))


def same_operations(whole: Sequence[Any], sliced: Sequence[Any]) -> bool:
    """Return whether both models run the same operations between sharded layers."""
    return [op.type for op in whole] == [op.type for op in sliced]
