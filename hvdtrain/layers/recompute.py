"""Activation checkpointing: less memory for one more forward pass."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import added_losses, flatten_layers, mask_of, run_graph, set_mask
from hvdtrain.config.errors import ConfigError, opt


@keras.saving.register_keras_serializable(package="hvdtrain")
class Recompute(keras.layers.Wrapper):
    """Wraps a layer and recomputes its activations in the backward pass.

    A Functional or Sequential model of n operations is split into about sqrt(n) segments, where a single tensor
    connects one to the next. Only these tensors are stored; the backward pass re-runs each segment's forward pass (Chen
    et al., "Training deep nets with sublinear memory cost", 2016). Any other layer, such as a block of a subclassed
    model, is one segment.

    Values and gradients equal those of the layer: the second pass repeats the random numbers of the first, if they come
    from the layers' Keras SeedGenerators, and updates no statistics. Losses of inner layers are added once. No effect
    outside of training. Inputs and outputs are those of the layer: tensors or nests of tensors.

    Args:
        layer: a layer or model.

    Example::

        block = keras.Sequential([keras.layers.Dense(64, "gelu"), keras.layers.Dense(32)])
        outputs = hvdtrain.Recompute(block)(keras.Input((32,)))
    """

    def __init__(self, layer: Any, **kwargs: Any) -> None:
        super().__init__(layer, autocast=False, **kwargs)
        self.supports_masking = True
        self._plan: _Plan | None = None

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Call the layer; in training, segment by segment."""
        if not training:
            return self.layer(inputs, training=training)
        if self._plan is None:
            self._plan = _Plan(_segments(self.layer))
        *first, last = self._plan.segments
        if not first:
            return recomputed(last, inputs)
        for segment in first:
            inputs = recomputed(segment, inputs)
        # The last segment's activations are needed at once: nothing to gain.
        return last(inputs, training=True)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Set no mask: the wrapped layer has set its own."""

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        config = super().get_config()
        config.pop("autocast", None)
        return config


@dataclass(frozen=True)
class _Plan:
    """Hides the segments from Keras, which would track them as layers."""

    segments: list[Any]


def recomputed_model(model: Any) -> Recompute:
    """Return `model` with recomputation, split into segments.

    Raises ConfigError unless it is a Functional or Sequential model with at least two segments.
    """
    if _graph(model) is None:
        raise ConfigError(
            f"{opt('recompute')} cuts Functional and Sequential models into segments. Received: "
            f"{type(model).__name__} {model.name!r}. Wrap its blocks in hvdtrain.Recompute in its own code."
        )
    if len(_segments(model)) < 2:
        raise ConfigError(
            f"{opt('recompute')} saves nothing on {type(model).__name__} {model.name!r}: it is too short, or two and "
            "more "
            "tensors lead on everywhere. Leave it out."
        )
    return Recompute(model, name=f"{model.name}_recomputed")


class _Segment(keras.layers.Layer):
    """Segment of a model's graph that forwards `training`; a keras.Function would fix it when built."""

    def __init__(self, function: Any) -> None:
        # A name derived from an underscored class is not a valid scope.
        super().__init__(autocast=False, name="segment")
        self.function = function
        self.inner = [operation for operation in function.operations if isinstance(operation, keras.layers.Layer)]
        self.supports_masking = True
        self.built = True

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        def in_phase(operation: Any) -> Callable[..., Any]:
            if not isinstance(operation, keras.layers.Layer):
                return operation
            return lambda *args, **kwargs: operation(*args, **{**kwargs, "training": training})

        return run_graph(self.function, inputs, in_phase)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> None:
        """Set no mask: the inner layers have set theirs."""


def _graph(layer: Any) -> Any:
    """Return the operations of a built Functional or Sequential model."""
    if type(layer).__module__.partition(".")[0] != "keras" or not isinstance(layer, keras.Model) or not layer.built:
        return None
    return keras.Function(*_ends(layer))


def _ends(model: Any) -> tuple[Any, Any]:
    """Return the symbolic inputs and outputs of a model, in their nests."""
    if isinstance(model, keras.Sequential):
        return model.inputs[0], model.outputs[0]
    return model.input, model.output


def _segments(layer: Any) -> list[Any]:
    """Split a model into consecutive segments; other layers are one segment."""
    graph = _graph(layer)
    if graph is None:
        return [layer]
    wanted = math.sqrt(len(graph.operations))
    inputs, outputs = _ends(layer)
    segments: list[Any] = []
    begin = None
    for cut in map(_output, graph.operations):
        if cut is None or not _leads_on(cut, outputs):
            continue
        segment = keras.Model(inputs, cut) if begin is None else keras.Function(begin, cut)
        if len(segment.operations) >= wanted:
            segments.append(segment if begin is None else _Segment(segment))
            begin = cut
    return [layer] if begin is None else [*segments, _Segment(keras.Function(begin, outputs))]


def _output(operation: Any) -> Any:
    """Return an operation's output, if a single float tensor used once."""
    try:
        tensor = operation.output
    except (AttributeError, ValueError):
        return None
    floats = isinstance(tensor, keras.KerasTensor) and keras.backend.is_float_dtype(tensor.dtype)
    return tensor if floats and not isinstance(operation, keras.layers.InputLayer) else None


def _leads_on(tensor: Any, outputs: Any) -> bool:
    """Return whether `tensor` alone determines all of `outputs`, and is not one."""
    if any(tensor is output for output in tf.nest.flatten(outputs)):
        return False
    try:
        keras.Function(tensor, outputs)
    except ValueError:  # disconnected
        return False
    return True


def recomputed(layer: Any, inputs: Any, inner_layers: Sequence[Any] | None = None) -> Any:
    """Call `layer` in training mode with a gradient that recomputes it.

    Args:
        layer: a layer or a callable with its interface.
        inputs: a nest of tensors.
        inner_layers: the layers inside it; default: those tracked by a Keras layer.
    """
    flat = tf.nest.flatten(inputs)
    masks = [mask_of(tensor) for tensor in flat]
    inner_layers = flatten_layers(layer) if inner_layers is None else inner_layers
    counted = [variable for inner in inner_layers for variable in getattr(inner, "counters", ())]
    volatile = [*map(_unwrapped, layer.non_trainable_variables), *counted]
    results: list[Any] = []
    owners: list[Any] = []

    def run(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        masked = [_masked(tf.identity(tensor), mask) for tensor, mask in zip(tensors, masks, strict=True)]
        with added_losses(inner_layers) as added:
            results.append(layer(tf.nest.pack_sequence_as(inputs, masked), training=True))
        owners[:] = [inner for inner, _ in added]
        return [*tf.nest.flatten(results[-1]), *(loss for _, loss in added)]

    @tf.custom_gradient
    def compute(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
        before = [variable.read_value() for variable in volatile]
        return run(tensors), partial(_gradient, run, tensors, volatile, before)

    outputs = tf.nest.flatten(compute(*flat))
    first = tf.nest.flatten(results[0])
    for owner, loss in zip(owners, outputs[len(first) :], strict=True):
        owner.add_loss(loss)  # its gradient is recomputed, too
    outputs = [_masked(new, mask_of(old)) for new, old in zip(outputs, first, strict=False)]
    return tf.nest.pack_sequence_as(results[0], outputs)


def _gradient(
    run: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
    tensors: Sequence[tf.Tensor],
    volatile: Sequence[tf.Variable],
    before: Sequence[tf.Tensor],
    *upstream: tf.Tensor,
    variables: Sequence[tf.Variable] = (),
) -> Any:
    """Return the gradients of `run` for `tensors`, and for `variables` if any."""
    after = [variable.read_value() for variable in volatile]
    _assign(volatile, before)
    # Otherwise the second pass could start early, and be merged with the first.
    with tf.control_dependencies(upstream):
        again = [tf.identity(tensor) for tensor in tensors]
    watched = [tensor for tensor in again if tensor.dtype.is_floating]
    with tf.GradientTape() as tape:
        tape.watch([*watched, *variables])
        outputs = run(again)
    _assign(volatile, after)
    assert len(outputs) == len(upstream), "the second pass makes what the first has made"
    found = iter(tape.gradient(outputs, [*watched, *variables], output_gradients=list(upstream)))
    own = [next(found) if tensor.dtype.is_floating else None for tensor in again]
    return (own, list(found)) if variables else own


def _masked(tensor: tf.Tensor, mask: Any) -> tf.Tensor:
    if mask is not None:
        set_mask(tensor, mask)
    return tensor


def _unwrapped(variable: Any) -> tf.Variable:
    return getattr(variable, "value", variable)


def _assign(variables: Sequence[tf.Variable], values: Sequence[tf.Tensor]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
