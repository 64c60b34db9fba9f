"""Private names of Keras 3's layers, models, metrics and callbacks."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend as keras_backend
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.losses import loss as keras_losses
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils

from hvdtrain.compat import unlike, uses_attribute
from hvdtrain.compat.keras_variables import is_stateless, on_their_devices

# Layers


def is_layer(thing: Any) -> bool:
    """Return whether `thing` is a layer of Keras 3, or a model."""
    return isinstance(thing, keras.layers.Layer)


def flatten_layers(layer: Any, *, recursive: bool = True, include_self: bool = True) -> list[Any]:
    """Return `layer` and its inner layers, outer first; none for an operation of keras.ops.

    Assumes `Layer._flatten_layers`, which repeats a layer that is held twice.
    """
    if isinstance(layer, keras.Operation) and not isinstance(layer, keras.layers.Layer):
        return []
    return list(layer._flatten_layers(recursive=recursive, include_self=include_self))


def add_weight_when_built(layer: Any, name: str, shape: Any, initializer: str, dtype: str) -> Any:
    """Return a new non-trainable weight of a built layer. Assumes `Layer._tracker`, as `Dense.enable_lora` does."""
    layer._tracker.unlock()
    weight = layer.add_weight(name=name, shape=shape, initializer=initializer, dtype=dtype, trainable=False)
    setattr(layer, name, weight)
    layer._tracker.lock()
    return weight


def own_trainable_variables(layer: Any) -> list[Any]:
    """Return a layer's own variables created as trainable, in order.

    Assumes `Layer._trainable_variables`, without inner layers.
    """
    return list(layer._trainable_variables)


def own_non_trainable_variables(layer: Any) -> list[Any]:
    """Return a layer's own variables created as non-trainable, in order.

    Assumes `Layer._non_trainable_variables`, without inner layers, metrics and generators.
    """
    return list(layer._non_trainable_variables)


def own_variables(layer: Any) -> list[Any]:
    """Return all of a layer's own variables."""
    return [*own_trainable_variables(layer), *own_non_trainable_variables(layer)]


def own_seed_generators(layer: Any) -> list[Any]:
    """Return a layer's own SeedGenerators. Assumes `Layer._seed_generators`."""
    return list(layer._seed_generators)


def own_metrics(layer: Any) -> list[Any]:
    """Return a layer's own metrics. Assumes `Layer._metrics`."""
    return list(layer._metrics)


def own_layers(layer: Any) -> list[Any]:
    """Return a layer's direct sublayers in creation order. Assumes `Layer._layers`."""
    return list(layer._layers)


LAYER_BOOKKEEPING = frozenset(
    {"_layers", "_trainable_variables", "_non_trainable_variables", "_seed_generators", "_metrics", "_tracker"}
)
"""Attributes in which Keras tracks, in creation order, values that other attributes hold already."""


def is_layer_graph(thing: Any) -> bool:
    """Return whether `thing` is a Functional or Sequential model.

    Assumes only these and `keras.Function` have `_operations`.
    """
    return isinstance(thing, keras.Sequential) or hasattr(thing, "_operations")


def constructor_arguments(layer: Any) -> dict[str, Any]:
    """Return a layer's constructor arguments; common ones (`dtype`, `trainable`) only if given.

    Assumes `Operation._auto_config.config`; None if the arguments cannot be serialized.
    """
    return getattr(getattr(layer, "_auto_config", None), "config", {})


def losses_of(layers: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return (layer, loss) for each loss added since the model's call.

    Assumes `add_loss` and activity regularizers append to `Layer._losses`. Raises CompatibilityError if they do not:
    losses would be lost or counted twice.
    """
    _check_losses()
    return [(layer, loss) for layer in layers for loss in layer._losses]


def clear_losses(layer: Any) -> None:
    """Clear the losses of a layer and its inner layers. Assumes `Layer._clear_losses`."""
    layer._clear_losses()


@contextmanager
def added_losses(layers: Sequence[Any]) -> Iterator[list[tuple[Any, tf.Tensor]]]:
    """Collect losses added by layers inside the context, and remove them. Raises as `losses_of`."""
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


@contextmanager
def kept_losses(layers: Sequence[Any]) -> Iterator[None]:
    """Restore after the context the losses that layers have added, which other threads that call them may clear.

    Assumes that `Layer._losses` and `_loss_ids` hold them.
    """
    kept = [(layer, list(layer._losses), set(layer._loss_ids)) for layer in layers]
    yield
    for layer, losses, ids in kept:
        layer._losses[:], layer._loss_ids = losses, ids


def _check_losses() -> None:
    if is_stateless():
        return  # nothing is added there
    with tf.init_scope():
        probe, loss = keras.layers.Layer(name="probe"), tf.zeros([])
        probe.add_loss(loss)
    if [id(each) for each in getattr(probe, "_losses", ())] != [id(loss)]:
        raise unlike("keras", losses_of, "Layer.add_loss appends to Layer._losses")


def kernel_of(layer: Any) -> Any:
    """Return a layer's stored kernel: without LoRA, not dequantized. Assumes `_kernel`."""
    return layer._kernel


@contextmanager
def with_kernel(layer: Any, value: Any) -> Iterator[None]:
    """Let a layer compute with another kernel inside this context. Assumes `_kernel`, an attribute like any other."""
    held = vars(layer)
    before = held["_kernel"]
    held["_kernel"] = value
    try:
        yield
    finally:
        held["_kernel"] = before


def embeddings_of(layer: Any) -> Any:
    """Return an Embedding's stored table: without LoRA, not dequantized. Assumes `_embeddings`."""
    return layer._embeddings


def mask_of(tensor: Any) -> Any:
    """Return a tensor's mask, or None. Assumes `_keras_mask`."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: Any, mask: Any) -> None:
    """Set a tensor's mask; None removes it. Assumes `_keras_mask`."""
    tensor._keras_mask = mask


class BatchNormalizationByMoments(keras.layers.BatchNormalization):
    """Keras' batch normalization with overridable training moments.

    Assumes `call` obtains them from `_moments`, over the dims `_reduction_axes`.
    """

    def moments(self, inputs: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance of `inputs` over `axes`, shape [size of axis]."""
        return super()._moments(inputs, mask)

    def build(self, input_shape: Any) -> None:
        """Create the variables.

        Raises CompatibilityError if Keras does not call `_moments`: statistics would be per replica.
        """
        if not uses_attribute(keras.layers.BatchNormalization, "_moments"):
            raise unlike("keras", BatchNormalizationByMoments, "BatchNormalization asks _moments for mean and variance")
        super().build(input_shape)

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        return self.moments(inputs, mask, self._reduction_axes)


# Models


def global_seed() -> tf.Variable:
    """Return the state of the generator of random numbers without a seed. Assumes `global_seed_generator`."""
    from keras.src.random.seed_generator import global_seed_generator

    state: tf.Variable = global_seed_generator().state.value
    return state


def operations_of(model: Any) -> list[Any]:
    """Return the operations of a Functional model and of those in it, layers among them. Assumes `_operations`."""
    nested = (getattr(layer, "_operations", ()) for layer in flatten_layers(model))
    return [operation for operations in nested for operation in operations]


def calls_of(operation: Any) -> list[tuple[Any, Any]]:
    """Return the arguments, of places and of names, with which an operation is called in graphs of Functional models.

    Assumes `Operation._inbound_nodes`, and their `arguments`.
    """
    return [(node.arguments.args, node.arguments.kwargs) for node in operation._inbound_nodes]


def compile_arguments(model: Any) -> dict[str, Any]:
    """Return the arguments of a model's last `compile`; empty if none. Assumes `Trainer._compile_config.config`."""
    return getattr(getattr(model, "_compile_config", None), "config", {})


def last_compile(model: Any) -> object | None:
    """Return the identity of a model's last `compile`; None if none.

    Assumes each call creates a new `Trainer._compile_config`.
    """
    return getattr(model, "_compile_config", None)


def compile_metrics(model: Any) -> Any:
    """Return the container of a model's compiled metrics, or None. Assumes `Trainer._compile_metrics`."""
    return getattr(model, "_compile_metrics", None)


def flatten_results(model: Any, results: dict[str, Any]) -> Any:
    """Return what `evaluate` returns for results by name: a list, or a single value.

    Assumes `Trainer._flatten_metrics_in_order`.
    """
    return model._flatten_metrics_in_order(results)


def drop_compile_metrics(model: Any) -> None:
    """Remove a model's compiled metrics, which a `compile` without metrics leaves.

    Assumes `Trainer._compile_metrics`.
    """
    model._compile_metrics = None


def functional_of(model: Any) -> Any:
    """Return a model, or a Sequential's inner Functional; None if not built. Assumes `Sequential._functional`."""
    return model._functional if isinstance(model, keras.Sequential) else model


def nodes_of(model: Any) -> list[Any] | None:
    """Return a Functional model's layer calls in topological order; None for other models.

    Assumes `Function._nodes_by_depth`, the last calls at depth 0.
    """
    depths = getattr(functional_of(model), "_nodes_by_depth", None)
    if depths is None:
        return None
    return [node for depth in sorted(depths, reverse=True) for node in depths[depth] if not node.is_input]


def ends_of(functional: Any) -> tuple[list[Any], list[Any]]:
    """Return a Functional model's symbolic inputs and outputs, flat. Assumes `Function._inputs` and `_outputs`."""
    return list(functional._inputs), list(functional._outputs)


def input_nest(model: Any) -> Any:
    """Return a Functional model's symbolic inputs in their nest; else None. Assumes `Function._inputs_struct`."""
    return getattr(model, "_inputs_struct", None)


def output_nest(functional: Any) -> Any:
    """Return a Functional model's symbolic outputs in their nest. Assumes `Function._outputs_struct`."""
    return functional._outputs_struct


def standardized_inputs(functional: Any, inputs: Any) -> list[Any]:
    """Flatten inputs and convert them to a Functional model's dtypes and ranks.

    Assumes `Functional._standardize_inputs`.
    """
    return list(functional._standardize_inputs(inputs))


def run_graph(function: Any, inputs: Any, call_of: Callable[[Any], Callable[..., Any]]) -> Any:
    """Run a `keras.Function`, calling each operation by `call_of(operation)`.

    Assumes `Function._run_through_graph(inputs, operation_fn)`.
    """
    return function._run_through_graph(inputs, operation_fn=call_of)


def operation_of(tensor: Any) -> Any:
    """Return the layer or operation that produced a symbolic tensor. Assumes `KerasTensor._keras_history`."""
    return tensor._keras_history.operation


# Metrics and callbacks


def function_of_metric(metric: Any) -> Any:
    """Return the function that a metric averages; None for other metrics. Assumes `MeanMetricWrapper._fn`."""
    return getattr(metric, "_fn", None)


@contextmanager
def replaced_function(metric: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a metric's function inside the context. Assumes `update_state` calls `MeanMetricWrapper._fn`."""
    before = metric._fn
    metric._fn = function
    try:
        yield
    finally:
        metric._fn = before


def is_default_hook(hook: Any) -> bool:
    """Return whether a callback method is Keras' no-op.

    Assumes Keras' `_is_default` mark. Without it every callback would request all batches, which is slower.
    """
    return bool(getattr(hook, "_is_default", False))


def profiles_batches(callback: Any) -> bool:
    """Return whether a TensorBoard callback profiles batches. Assumes `TensorBoard._should_trace`."""
    return bool(getattr(callback, "_should_trace", False))


# Steps


def module_of_losses() -> Any:
    """Return the module whose `reduce_weighted_values` forms a loss of its values; callers may replace it.

    It takes values, sample_weight, mask, reduction and dtype. Assumes `Loss.__call__` calls keras.src.losses.loss's.

    Raises:
        CompatibilityError: if it does not: a masked loss would be divided by this rank's elements alone.
    """
    call = vars(keras.losses.Loss)["__call__"]
    if "reduce_weighted_values" not in getattr(call, "original", call).__code__.co_names:
        raise unlike("keras", module_of_losses, "Loss.__call__ forms its value by reduce_weighted_values")
    return keras_losses


def divisor_of(sample_weight: Any, mask: Any, reduction: str, dtype: Any) -> Any:
    """Return what a loss is divided by if not by its number of values; None if by that.

    Assumes Keras divides a masked loss by `sum(mask)`, and one reduced by `mean_with_sample_weight` by the sum of its
    weights after `keras.src.losses.loss.apply_mask`.
    """
    if reduction == "mean_with_sample_weight" and (mask is not None or sample_weight is not None):
        if sample_weight is not None:
            sample_weight = tf.convert_to_tensor(sample_weight)
        merged = keras_losses.apply_mask(sample_weight, mask, dtype=dtype, reduction=reduction)
        return tf.reduce_sum(tf.cast(merged, dtype))
    return None if mask is None else tf.reduce_sum(tf.cast(mask, dtype))


def function_of_loss(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Return the function that a loss calls with targets and outputs, and its other arguments; (None, {}) if none.

    Assumes `LossFunctionWrapper.fn` and `_fn_kwargs`, which hold what `get_config` may leave out, such as an axis.
    """
    function = getattr(loss, "fn", None) if isinstance(loss, keras.losses.Loss) else loss
    arguments = dict(getattr(loss, "_fn_kwargs", {}))
    if isinstance(function, functools.partial) and not function.args:
        return function.func, {**function.keywords, **arguments}
    return function, arguments


def loss_of_function() -> type:
    """Return the class of losses that call `function_of_loss`. Assumes `keras.losses.MeanSquaredError` is one."""
    kind: type = keras.losses.MeanSquaredError.__mro__[1]
    return kind


def loss_tracker(model: Any) -> Any:
    """Return the `Mean` that a compiled model reports as `loss`. Assumes `Trainer._loss_tracker`."""
    return model._loss_tracker


def compiled_losses(model: Any) -> Any:
    """Return the container of a model's compiled losses, or None. Assumes `Trainer._compile_loss`."""
    return getattr(model, "_compile_loss", None)


def compiled_metrics(model: Any) -> list[Any]:
    """Return the metrics of a model's `compile`, once built. Assumes `CompileMetrics.metrics`."""
    container = compile_metrics(model)
    return [] if container is None else list(container.metrics)


def trackers_of_outputs(model: Any) -> list[Any]:
    """Return the `Mean`s of a built model's losses of several outputs. Assumes `CompileLoss.metrics`."""
    container = compiled_losses(model)
    return [] if container is None else list(container.metrics)


def losses_by_output(model: Any) -> list[Any]:
    """Return a built model's loss objects, one per output with a loss. Assumes `CompileLoss._flat_losses`."""
    container = compiled_losses(model)
    return [] if container is None else [each.loss for each in container._flat_losses or ()]


def joined_outputs(parts: Sequence[Any]) -> Any:
    """Return one output of `predict`, as an array, or ragged as it was or where its inner dims differ by batch.

    Assumes `potentially_ragged_concat` and `convert_to_np_if_not_ragged` of keras.src.backend.tensorflow.trainer.
    """
    composite = (tf.RaggedTensor, tf.SparseTensor)
    tensors = [each if isinstance(each, composite) else tf.convert_to_tensor(each) for each in parts]
    return keras_trainer.convert_to_np_if_not_ragged(keras_trainer.potentially_ragged_concat(tensors))


def sparse_tensor(matrix: Any) -> tf.SparseTensor:
    """Return SciPy's sparse matrix as a SparseTensor.

    Assumes `scipy_sparse_to_tf_sparse` of keras.src.trainers.data_adapters.data_adapter_utils.
    """
    return data_adapter_utils.scipy_sparse_to_tf_sparse(matrix)


def sliceable_rows(sparse: tf.SparseTensor) -> Any:
    """Return a SparseTensor in the form that `gathered_rows` takes.

    Assumes `to_tensorflow_sparse_wrapper` of keras.src.trainers.data_adapters.array_slicing.
    """
    return array_slicing.to_tensorflow_sparse_wrapper(sparse)


def gathered_rows(rows: Any, numbers: tf.Tensor) -> tf.SparseTensor:
    """Return rows by number, as Keras' adapter of arrays does.

    Assumes `slice_tensorflow_sparse_wrapper` of keras.src.trainers.data_adapters.array_slicing.
    """
    return array_slicing.slice_tensorflow_sparse_wrapper(rows, numbers)


def build_from(model: Any, data: Any) -> Any:
    """Create the variables of a compiled model, its losses and metrics, from a batch as `train_step` gets it.

    Nothing is computed, drawn or counted. Returns the symbolic outputs.

    Assumes `compute_output_spec` of keras.src.backend creates variables as a call does.
    """
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    with on_their_devices():
        outputs = keras_backend.compute_output_spec(model, _symbolic(x), training=False)
    build_objective(model, inputs=x, outputs=outputs, targets=y, sample_weight=sample_weight)
    return outputs


def build_objective(model: Any, *, inputs: Any, outputs: Any, targets: Any, sample_weight: Any) -> None:
    """Create the variables of a compiled model's losses and metrics for such symbolic outputs.

    Assumes `Trainer._compile_loss` and `_compile_metrics` are built by the first `compute_metrics` and `_compute_loss`.
    """
    x, y, weight = _symbolic(inputs), _symbolic(targets), _symbolic(sample_weight)
    for container, compute, options in (
        (compile_metrics(model), model.compute_metrics, {}),
        (compiled_losses(model), model._compute_loss, {"training": False}),
    ):
        if container is not None and not container.built:
            keras_backend.compute_output_spec(compute, x, y, outputs, weight, **options)


def _symbolic(tensors: Any) -> Any:
    """Return Keras' symbols of the shapes and dtypes of tensors."""
    return tf.nest.map_structure(
        lambda each: (
            None if each is None else keras.KerasTensor(each.shape, keras.backend.standardize_dtype(each.dtype))
        ),
        tensors,
    )
