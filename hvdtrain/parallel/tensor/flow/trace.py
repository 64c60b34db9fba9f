"""One trace of a model: the operations between the layers that hold slices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import clear_losses, flatten_layers, losses_of
from hvdtrain.parallel.inputs import TRACED_BATCH
from hvdtrain.parallel.tensor.flow.record import FlowRecord, LayerCall
from hvdtrain.parallel.tensor.outputs import sharded_outputs


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
