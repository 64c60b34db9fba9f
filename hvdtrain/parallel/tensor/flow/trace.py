"""Trace a model: the operations between the layers that hold slices, and what those layers took and gave."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import clear_losses, flatten_layers, input_nest, losses_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.outputs import sharded_outputs

BY_OUTPUT_RULE = " (by its output rule)"
"""Behind the name of a layer of which not the computation is split but the output."""


@dataclass
class LayerCall:
    """One call of a layer that holds slices, within a trace."""

    layer: str
    """The layer's kind and path."""
    begin: int
    """The number of operations in the graph before the call."""
    end: int = 0
    """And behind it."""
    takes: list[tuple[Any, int]] = field(default_factory=list)
    """Tensors that must be sharded along a dim, counted from the last (-1)."""
    gives: list[tuple[Any, int]] = field(default_factory=list)
    """Tensors that are sharded along a dim, counted from the last."""
    blocks: tuple[int, ...] = ()
    """Lengths of the blocks that the sharded dim of what it gives has side by side; none of a plain slice."""
    passes: list[tuple[Any, Any, Callable[[int], int | None]]] = field(default_factory=list)
    """An input, an output, and a function from the dim along which the first may be sharded to that of the second;
    None where it must be whole."""


@dataclass
class FlowRecord:
    """The calls of one trace; nothing is recorded unless `graph` is set."""

    graph: Any = None
    calls: list[LayerCall] = field(default_factory=list)
    _open: LayerCall | None = None

    @contextmanager
    def call(self, layer: str) -> Iterator[LayerCall]:
        """Record the call of a layer; calls of layers inside it are a part of it."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        call = LayerCall(layer, _operations(graph))
        if self.graph is None or self._open is not None:
            yield call
            return
        if graph is not self.graph:
            raise ConfigError(
                f"{layer} is split among ranks and is called within a loop, a branch or a tf.function of the model, "
                "where nobody can follow what it gives. Call it outside of these, or leave it whole."
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
        """Record what is called while `graph` is traced."""
        self.graph, self.calls = graph, []
        try:
            yield
        finally:
            self.graph = None


def _operations(graph: Any) -> int:
    return 0 if graph is None else len(graph.get_operations())


TRACED_BATCH = 7
"""Samples that a model is built and traced with: a size that no dim of its weights is likely to have."""


def built(model: Any, inputs: Any) -> Any:
    """Return `model`, or what it builds, with the variables of a class of the user's own created.

    It is called with a batch of one size: with any size a layer behind a reshape to (batch, length, -1) would not know
    the width that it is given.
    """
    made = model if isinstance(model, keras.Model) else model()
    if inputs is not None and isinstance(made, keras.Model) and not made.built:
        made(tf.nest.map_structure(lambda t: keras.KerasTensor((TRACED_BATCH, *t.shape[1:]), _dtype(t)), inputs))
    return made


def _dtype(tensor: Any) -> str:
    return str(tf.as_dtype(tensor.dtype).name)


def input_specs(model: Any, inputs: Any) -> Any:
    """Return shapes and dtypes of what the model is called with.

    Raises:
        ConfigError: the model does not tell.
    """
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
    """Return specs of the inputs of a Functional or Sequential model; None of one that does not tell them."""
    if isinstance(model, keras.Sequential):
        inputs = model.inputs[0] if model.built and model.inputs else None
    else:
        inputs = input_nest(model)
    return None if inputs is None else tf.nest.map_structure(spec_of_input, inputs)


def spec_of_input(tensor: Any) -> tf.TensorSpec:
    """Return shape and dtype of an input of any batch size."""
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)


@dataclass(frozen=True)
class Trace:
    """The operations of a model in the order in which they were made, and its calls of layers that hold slices."""

    graph: Any
    operations: list[Any]
    """Without those inside the calls."""
    calls: list[LayerCall]
    outputs: list[Any]
    inputs: list[Any]
    losses: list[tuple[Any, Any]]
    """What layers have added, with the layer."""


def traced(model: Any, inputs: Any, record: FlowRecord, *, training: bool) -> Trace:
    """Trace `model`.

    Args:
        model: a built Keras model.
        inputs: a nest of anything with a shape and a dtype.
        record: where the layers note their calls.
        training: whether it is called as in training, or as in evaluation and prediction.
    """
    graph = tf.__internal__.FuncGraph("layouts")
    with graph.as_default(), record.of(graph):
        given = tf.nest.map_structure(lambda t: tf.compat.v1.placeholder(t.dtype, t.shape), inputs)
        outputs = sharded_outputs(model, model, given, training=training)
    layers = {id(layer): layer for layer in flatten_layers(model) if isinstance(layer, keras.Layer)}.values()
    losses = [(layer, loss) for layer, loss in losses_of(layers) if getattr(loss, "graph", None) is graph]
    clear_losses(model)
    inside = {place for call in record.calls for place in range(call.begin, call.end)}
    operations = [op for place, op in enumerate(graph.get_operations()) if place not in inside]
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
    """Return the specs of a batch of one size, so that the other dims of activations are known wherever -1 stands."""

    def sized(spec: Any) -> Any:
        free = spec.shape.rank and spec.shape[0] is None
        return tf.TensorSpec([TRACED_BATCH, *spec.shape[1:]], spec.dtype) if free else spec

    return tf.nest.map_structure(sized, specs)


def shown(shape: tf.TensorShape) -> tuple[int | None, ...]:
    """Return the shape of an activation for messages, in which a batch has any size."""
    return tuple(None if dim == 0 and n == TRACED_BATCH else n for dim, n in enumerate(shape.as_list()))


def same_operations(whole: Sequence[Any], sliced: Sequence[Any]) -> bool:
    """Whether a model does the same whole and with slices, between the layers that hold them."""
    return [op.type for op in whole] == [op.type for op in sliced]
