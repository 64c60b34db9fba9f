"""Graph of a Functional or Sequential model, as topologically sorted calls."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import ends_of, functional_of, mask_of, nodes_of
from hvdtrain.config.errors import ConfigError, opt


@dataclass(frozen=True)
class Graph:
    """A model's layer and operation calls in topological order.

    Symbolic tensors (`keras.KerasTensor`) identify their inputs and outputs.
    """

    nodes: tuple[Any, ...]
    """Keras nodes."""
    inputs: tuple[Any, ...]
    """Inputs of the model; available to every stage, as every rank reads the batch."""
    outputs: tuple[Any, ...]

    def crossing(self, place: int) -> list[Any]:
        """Return tensors of the first `place` calls, used later or returned."""
        made = {id(tensor): tensor for node in self.nodes[:place] for tensor in node.outputs}
        used = [tensor for node in self.nodes[place:] for tensor in node.input_tensors]
        wanted = {id(tensor) for tensor in (*used, *self.outputs)}
        return [tensor for key, tensor in made.items() if key in wanted]


def graph_of(model: Any) -> Graph:
    """Return the graph of `model`. Raises ConfigError if not a built Functional or Sequential model."""
    nodes = _nodes(model)
    if nodes is None:
        raise ConfigError(
            f"{opt('parallel')} pp=… cuts Functional and Sequential models, whose layers are known, into stages. "
            "Received: "
            f"{type(model).__name__} {model.name!r}{_advice(model)}"
        )
    inputs, outputs = ends_of(functional_of(model))
    return Graph(tuple(nodes), tuple(inputs), tuple(outputs))


def _nodes(model: Any) -> list[Any] | None:
    """Return the calls of `model`; None for a subclass with its own `call`."""
    caller = next(cls for cls in type(model).__mro__ if "call" in vars(cls))
    return nodes_of(model) if caller.__module__.partition(".")[0] == "keras" else None


def _advice(model: Any) -> str:
    if isinstance(model, keras.Sequential):
        return ", which has no keras.Input: begin it with one."
    return ": write it with keras.Input and keras.Model(inputs, outputs), or train it without pp."


def run(
    nodes: Iterable[Any], known: Mapping[int, Any], wanted: Sequence[Any], *, training: bool | None
) -> list[tf.Tensor]:
    """Call `nodes` in order and return the values of `wanted`; `known` has values by symbol id."""
    values = dict(known)
    for node in nodes:
        args, kwargs = node.arguments.fill_in(values)
        if isinstance(node.operation, keras.Layer):
            kwargs = {**kwargs, "training": training}
        results = node.operation(*args, **kwargs)
        for symbol, value in zip(node.outputs, tf.nest.flatten(results), strict=True):
            values[id(symbol)] = value
    return [values[id(tensor)] for tensor in wanted]


def sliced_tensors(graph: Graph) -> set[int]:
    """Return the ids of symbolic tensors that are sharded along tp."""
    symbols, shapes = symbols_of(graph), shapes_here(graph)
    return {id(s) for s, shape in zip(symbols, shapes, strict=True) if not shape.is_compatible_with(s.shape)}


def masks_at(graph: Graph, bounds: Sequence[int]) -> tuple[frozenset[int], ...]:
    """Return the ids of masked tensors after n calls, for n in `bounds`.

    Their symbols do not show it: attention removes the masks of its inputs.
    """
    symbols = [symbol for symbol in symbols_of(graph) if mask_of(symbol) is not None]
    found: list[frozenset[int]] = []
    if not symbols:
        return tuple(frozenset() for _ in bounds)

    def call(*inputs: tf.Tensor) -> None:
        values = dict(zip(map(id, graph.inputs), inputs, strict=True))
        for begin, end in pairwise([0, *bounds]):
            nodes = graph.nodes[begin:end]
            made = [tensor for node in nodes for tensor in node.outputs]
            values |= zip(map(id, made), run(nodes, values, made, training=False), strict=True)
            found.append(frozenset(id(s) for s in symbols if mask_of(values.get(id(s))) is not None))

    tf.function(call, autograph=False).get_concrete_function(*_specs_of_inputs(graph))
    return tuple(found)


def _specs_of_inputs(graph: Graph) -> list[tf.TensorSpec]:
    return [tf.TensorSpec(symbol.shape, symbol.dtype) for symbol in graph.inputs]


def symbols_of(graph: Graph) -> list[Any]:
    """Return the symbolic tensors produced in `graph`."""
    return [tensor for node in graph.nodes for tensor in node.outputs]


def shapes_here(graph: Graph) -> list[tf.TensorShape]:
    """Return the local shapes of `symbols_of`'s tensors, sharded or not."""
    symbols = symbols_of(graph)

    def call(*inputs: tf.Tensor) -> list[tf.Tensor]:
        return run(graph.nodes, dict(zip(map(id, graph.inputs), inputs, strict=True)), symbols, training=False)

    made = tf.function(call, autograph=False).get_concrete_function(*_specs_of_inputs(graph)).structured_outputs
    return [tensor.shape for tensor in made]


def variables_of(nodes: Iterable[Any]) -> list[Any]:
    """Return the Keras variables of the layers in `nodes`, each once."""
    layers = [node.operation for node in nodes if isinstance(node.operation, keras.Layer)]
    found = {id(variable): variable for layer in layers for variable in layer.variables}
    return list(found.values())


def is_float(tensor: Any) -> bool:
    """Return whether a symbolic tensor has a gradient."""
    return bool(keras.backend.is_float_dtype(tensor.dtype))


def specs_of(graph: Graph, shapes: Mapping[int, tuple[int | None, ...]], wanted: Sequence[Any]) -> list[Any]:
    """Return the shapes of `wanted`, with None for the batch dim; `shapes` by symbolic input id."""
    as_declared = all(tuple(symbol.shape[1:]) == tuple(shapes[id(symbol)][1:]) for symbol in graph.inputs)
    if as_declared or all(None not in tensor.shape[1:] for tensor in wanted):
        return [tuple(tensor.shape) for tensor in wanted]
    values: dict[int, Any] = {
        id(symbol): keras.KerasTensor((None, *shapes[id(symbol)][1:]), symbol.dtype) for symbol in graph.inputs
    }
    for node in graph.nodes:
        args, kwargs = node.arguments.fill_in(values)
        results = node.operation.compute_output_spec(*args, **kwargs)
        for symbol, value in zip(node.outputs, keras.tree.flatten(results), strict=True):
            values[id(symbol)] = value
    return [tuple(values[id(tensor)].shape) for tensor in wanted]
