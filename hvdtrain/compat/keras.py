"""Private names of Keras 3's layers, models, metrics and callbacks, by what hvdtrain uses them for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat import unlike, uses_attribute
from hvdtrain.compat.keras_variables import is_stateless

# Layers


def flatten_layers(layer: Any, *, recursive: bool = True, include_self: bool = True) -> list[Any]:
    """Return `layer` and the layers inside it, an outer one before its inner ones; none of an operation of keras.ops.

    Assumed: `Layer._flatten_layers` yields them; a layer that is held twice comes twice.
    """
    if isinstance(layer, keras.Operation) and not isinstance(layer, keras.layers.Layer):
        return []
    return list(layer._flatten_layers(recursive=recursive, include_self=include_self))


def own_trainable_variables(layer: Any) -> list[Any]:
    """Return the variables that `layer` itself has made to be trained, in their order, whether it is frozen or not.

    Assumed: `Layer._trainable_variables` holds them, without those of inner layers.
    """
    return list(layer._trainable_variables)


def own_non_trainable_variables(layer: Any) -> list[Any]:
    """Return the variables that `layer` itself has made not to be trained, in their order.

    Assumed: `Layer._non_trainable_variables` holds them, without those of inner layers, metrics and generators.
    """
    return list(layer._non_trainable_variables)


def own_variables(layer: Any) -> list[Any]:
    """Return all variables that `layer` itself has made."""
    return [*own_trainable_variables(layer), *own_non_trainable_variables(layer)]


def own_seed_generators(layer: Any) -> list[Any]:
    """Return the random generators that attributes of `layer` hold.

    Assumed: `Layer._seed_generators`.
    """
    return list(layer._seed_generators)


def own_metrics(layer: Any) -> list[Any]:
    """Return the metrics that attributes of `layer` hold.

    Assumed: `Layer._metrics`.
    """
    return list(layer._metrics)


def own_layers(layer: Any) -> list[Any]:
    """Return the layers that attributes of `layer` hold, in the order of their creation.

    Assumed: `Layer._layers`.
    """
    return list(layer._layers)


LAYER_BOOKKEEPING = frozenset(
    {"_layers", "_trainable_variables", "_non_trainable_variables", "_seed_generators", "_metrics", "_tracker"}
)
"""Attributes in which Keras lists, in the order of creation, what a layer's other attributes hold already."""


def is_list_of_layers(thing: Any) -> bool:
    """Whether `thing` is a Functional or Sequential model: layers that are called as a graph.

    Assumed: these have `_operations`, as `keras.Function` has, and other layers have not.
    """
    return isinstance(thing, keras.Sequential) or hasattr(thing, "_operations")


def constructor_arguments(layer: Any) -> dict[str, Any]:
    """Return the arguments that a layer was made with; those of every layer (`dtype`, `trainable`) only if given.

    Assumed: `Operation._auto_config.config`; None where the arguments cannot be saved.
    """
    return getattr(getattr(layer, "_auto_config", None), "config", {})


def losses_of(layers: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return each loss that `add_loss` or an activity regularizer has added since the model's call, with its layer.

    Assumed: `Layer._losses` is the list to which `add_loss` appends.

    Raises:
        CompatibilityError: it is not: losses would be lost or counted twice.
    """
    _check_losses()
    return [(layer, loss) for layer in layers for loss in layer._losses]


def clear_losses(layer: Any) -> None:
    """Forget the losses that `layer` and the layers inside it have added.

    Assumed: `Layer._clear_losses`, which the outermost call does as well.
    """
    layer._clear_losses()


@contextmanager
def added_losses(layers: Sequence[Any]) -> Iterator[list[tuple[Any, tf.Tensor]]]:
    """Yield a list that holds, behind the context, each loss that a layer has added inside it; the layer has it not.

    Raises:
        CompatibilityError: as `losses_of`.
    """
    # The outermost call of a Keras layer clears the losses of those within it.
    before = [list(layer._losses) for layer in layers]
    for layer in layers:
        layer._losses.clear()
    added: list[tuple[Any, tf.Tensor]] = []
    try:
        yield added
        added += losses_of(layers)
    finally:
        for layer, losses in zip(layers, before, strict=True):
            layer._losses[:] = losses


def _check_losses() -> None:
    if is_stateless():
        return  # nothing is added there
    with tf.init_scope():
        probe, loss = keras.layers.Layer(name="probe"), tf.zeros([])
        probe.add_loss(loss)
    if [id(each) for each in getattr(probe, "_losses", ())] != [id(loss)]:
        raise unlike("keras", losses_of, "Layer.add_loss appends to Layer._losses")


def kernel_of(layer: Any) -> Any:
    """Return the kernel of a Dense, EinsumDense or convolution as it is kept: without a LoRA, and not dequantized.

    Assumed: `_kernel`.
    """
    return layer._kernel


def embeddings_of(layer: Any) -> Any:
    """Return the table of an Embedding as it is kept: without a LoRA, and not dequantized.

    Assumed: `_embeddings`.
    """
    return layer._embeddings


def mask_of(tensor: Any) -> Any:
    """Return the mask of a tensor, symbolic or not; None if it has none.

    Assumed: `_keras_mask`, which attention takes off what it is given.
    """
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Give a tensor a mask; None takes it off.

    Assumed: as `mask_of`.
    """
    tensor._keras_mask = mask


class BatchNormalizationByMoments(keras.layers.BatchNormalization):
    """Keras' batch normalization with moments that a subclass computes, in training.

    Assumed: `call` asks `_moments` for them, and `_reduction_axes` are the dims that they are over.
    """

    def moments(self, inputs: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance of `inputs` over `axes`, shape [size of axis]."""
        return super()._moments(inputs, mask)

    def build(self, input_shape: Any) -> None:
        """Create the variables.

        Raises:
            CompatibilityError: Keras does not ask for the moments: they would be those of one replica.
        """
        if not uses_attribute(keras.layers.BatchNormalization, "_moments"):
            raise unlike("keras", BatchNormalizationByMoments, "BatchNormalization asks _moments for mean and variance")
        super().build(input_shape)

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return self.moments(inputs, mask, self._reduction_axes)


# Models


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments of the last `compile` of a model, as they were given; empty if there was none.

    Assumed: `Trainer._compile_config.config`.
    """
    return getattr(getattr(model, "_compile_config", None), "config", {})


def last_compile(model: Any) -> object | None:
    """Return what tells one call of `model.compile` from another; None if there was none.

    Assumed: `Trainer._compile_config` is made anew by each.
    """
    return getattr(model, "_compile_config", None)


def compile_metrics(model: Any) -> Any:
    """Return the object that keeps the metrics of `compile`, which are built by targets and outputs; None without.

    Assumed: `Trainer._compile_metrics`.
    """
    return getattr(model, "_compile_metrics", None)


def functional_of(model: Any) -> Any:
    """Return the Functional model itself, or the one inside a Sequential model, None if that is not built.

    Assumed: `Sequential._functional`.
    """
    return model._functional if isinstance(model, keras.Sequential) else model


def nodes_of(model: Any) -> list[Any] | None:
    """Return the calls of layers that a Functional model consists of, each after those whose results it uses.

    None for other models. Assumed: `Function._nodes_by_depth`, the last calls at depth 0.
    """
    depths = getattr(functional_of(model), "_nodes_by_depth", None)
    if depths is None:
        return None
    return [node for depth in sorted(depths, reverse=True) for node in depths[depth] if not node.is_input]


def ends_of(functional: Any) -> tuple[list[Any], list[Any]]:
    """Return the symbolic inputs and outputs of a Functional model, flat.

    Assumed: `Function._inputs` and `_outputs`.
    """
    return list(functional._inputs), list(functional._outputs)


def input_nest(model: Any) -> Any:
    """Return the symbolic inputs of a Functional model in their nest; None of other models.

    Assumed: `Function._inputs_struct`.
    """
    return getattr(model, "_inputs_struct", None)


def output_nest(functional: Any) -> Any:
    """Return the symbolic outputs of a Functional model in their nest.

    Assumed: `Function._outputs_struct`.
    """
    return functional._outputs_struct


def standardized_inputs(functional: Any, inputs: Any) -> list[Any]:
    """Return a nest of tensors flat, in the dtypes and ranks that a Functional model takes.

    Assumed: `Functional._standardize_inputs`.
    """
    return list(functional._standardize_inputs(inputs))


def run_graph(function: Any, inputs: Any, call_of: Callable[[Any], Callable[..., Any]]) -> Any:
    """Run a `keras.Function`, where `call_of` returns how each of its operations is called.

    Assumed: `Function._run_through_graph(inputs, operation_fn)`.
    """
    return function._run_through_graph(inputs, operation_fn=call_of)


def operation_of(tensor: Any) -> Any:
    """Return the layer or operation that made a symbolic tensor.

    Assumed: `KerasTensor._keras_history`.
    """
    return tensor._keras_history.operation


# Attention


def replace_attention(
    layer: Any, *, attention: Callable[..., Any], mask: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Let an attention layer compute by other functions, and return its own two.

    Args:
        layer: a MultiHeadAttention or GroupQueryAttention.
        attention: takes query, key and value by heads, [batch, positions, heads, features], the attention's mask and
            further arguments of Keras' own; returns outputs and scores.
        mask: takes query and value, [batch, positions, …], and masks; returns the attention's mask.

    Assumed: `call` asks the layer's `_compute_attention` and `_compute_attention_mask` for these.

    Raises:
        CompatibilityError: when the layer is called, and does not: each rank would attend to its own positions alone.
    """
    own, whole_call = (layer._compute_attention, layer._compute_attention_mask), layer.call
    asked: list[bool] = []

    def asked_attention(*args: Any, **options: Any) -> Any:
        asked.append(True)
        return attention(*args, **options)

    def call(*args: Any, **options: Any) -> Any:
        asked.clear()
        outputs = whole_call(*args, **options)
        if not asked:
            raise unlike("keras", replace_attention, f"{type(layer).__name__}.call attends by _compute_attention")
        return outputs

    vars(layer).update(_compute_attention=asked_attention, _compute_attention_mask=mask, call=call)
    return own


def query_kernel(layer: Any) -> Any:
    """Return the kernel of the projection of queries, [features, heads, features of a head].

    Assumed: `_query_dense`.
    """
    return kernel_of(layer._query_dense)


def attention_axes(layer: Any) -> tuple[int, ...]:
    """Return the dims along which an attention layer attends; empty where only its call tells.

    Assumed: `_attention_axes`, which a GroupQueryAttention has not.
    """
    return tuple(getattr(layer, "_attention_axes", None) or ())


def attention_projections(layer: Any) -> list[tuple[Any, int]]:
    """Return the projections of an attention layer, and the dim of each kernel that counts heads.

    Assumed: `_query_dense`, `_key_dense`, `_value_dense`, `_output_dense` and, where there is a gate, `_gate_dense`.
    """
    gate = getattr(layer, "_gate_dense", None)
    inputs = [layer._query_dense, layer._key_dense, layer._value_dense, *([] if gate is None else [gate])]
    return [*((each, 1) for each in inputs), (layer._output_dense, 0)]


# Metrics and callbacks


def function_of_metric(metric: Any) -> Any:
    """Return the function whose values a metric averages; None of other metrics.

    Assumed: `MeanMetricWrapper._fn`.
    """
    return getattr(metric, "_fn", None)


def metric_with_function(metric: Any) -> Any:
    """Return a MeanMetricWrapper like `metric`, with the same function and arguments of it.

    Assumed: `MeanMetricWrapper._fn` and `_fn_kwargs`.
    """
    return type(metric)(metric._fn, metric.name, metric.dtype, **metric._fn_kwargs)


@contextmanager
def replaced_function(metric: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let a metric average the values of another function inside the context.

    Assumed: `MeanMetricWrapper._fn` is called by `update_state`.
    """
    before = metric._fn
    metric._fn = function
    try:
        yield
    finally:
        metric._fn = before


def is_default_hook(hook: Any) -> bool:
    """Whether a method of a callback is one of Keras' own that does nothing.

    Assumed: `_is_default` marks them. Without the mark each callback would ask for all batches, which is slower.
    """
    return bool(getattr(hook, "_is_default", False))


def profiles_batches(callback: Any) -> bool:
    """Whether a TensorBoard callback profiles some batches.

    Assumed: `TensorBoard._should_trace`.
    """
    return bool(getattr(callback, "_should_trace", False))
