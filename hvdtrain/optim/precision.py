"""Mixed precision: 16-bit computation, 32-bit master weights, and loss scaling for fp16."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import constructor_arguments, flatten_layers, operation_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.training import PrecisionName


@keras.saving.register_keras_serializable(package="hvdtrain")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Dynamic loss scaling, as in Keras, for reduced gradients; apply them still scaled.

    A reduced gradient is non-finite if any replica's is, so all replicas skip the same steps and their scales stay
    equal. Unlike Keras' own, it checks sparse gradients without densifying them.

    Example::

        optimizer = hvdtrain.LossScaleOptimizer(keras.optimizers.Adam(1e-3))
        with hvdtrain.DistributedGradientTape() as tape:
            scaled = optimizer.scale_loss(loss(y, model(x, training=True)))
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
    """

    def check_finite(self, grads: Any) -> Any:
        """Return whether all gradients are finite."""
        parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])


def with_loss_scaling(optimizer: Any) -> Any:
    """Wrap `optimizer` in loss scaling, unless it is wrapped."""
    return optimizer if has_dynamic_scale(optimizer) else LossScaleOptimizer(optimizer)


def scales_loss(model: Any) -> bool:
    """Return whether Keras' `compile` scales the loss of `model`: by its policy, whatever that of single layers."""
    return bool(model.dtype_policy.name == "mixed_float16")


def has_dynamic_scale(optimizer: Any) -> bool:
    """Return whether `optimizer` adapts its loss scale and skips overflowing steps."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def loss_scale_of(optimizer: Any) -> Any:
    """Return the loss scale that `optimizer` expects: a scalar tensor or a number."""
    if has_dynamic_scale(optimizer):
        return tf.convert_to_tensor(optimizer.dynamic_scale)
    return optimizer.loss_scale_factor or 1.0


@contextmanager
def precision(name: PrecisionName | None) -> Iterator[None]:
    """Build layers under the dtype policy `name`, if any, inside this context; variables stay float32."""
    if name is None:
        yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def set_precision(model: Any, name: PrecisionName) -> None:
    """Set the dtype policy `name` on an existing model's layers.

    It then computes as if it had been built under that policy: Keras reads a layer's policy on each call and casts its
    float32 variables. Layers that were given a dtype keep theirs, and so do those of another policy than the model's.
    Whether a loaded or cloned layer was given one is unknown: it keeps its own if it computes an output of the model.
    Raises ConfigError for variables that are not float32, which a policy cannot change any more.
    """
    others = {str(v.dtype) for v in model.weights if str(v.dtype).startswith(("float", "bfloat"))} - {"float32"}
    if others or model.dtype_policy.variable_dtype != "float32":
        raise ConfigError(
            f"precision={name!r} needs float32 variables. Received: a model of the dtype policy "
            f"{model.dtype_policy.name}. Pass a function that builds the model."
        )
    # A user passed dtype=…; layers created from a config always get one.
    given = [layer for layer in _layers_of(model) if constructor_arguments(layer).get("dtype") is not None]
    kept = [layer for layer in given if not _is_from_config(layer)]
    outputs = [operation_of(output) for output in tf.nest.flatten(getattr(model, "outputs", None) or [])]
    kept += [layer for layer in outputs if _is_from_config(layer)]
    _set_policy(model, keras.dtype_policies.get(name), model.dtype_policy.name, kept)


@contextmanager
def computing_in_float32(model: Any) -> Iterator[str]:
    """Let layers of a mixed policy compute in 32 bits inside this context; yield the name of the policy, or ""."""
    mixed = [(layer, layer.dtype_policy) for layer in flatten_layers(model) if _is_mixed(layer.dtype_policy)]
    plain = keras.dtype_policies.get("float32")
    for layer, _ in mixed:
        layer.dtype_policy = plain
    try:
        yield mixed[0][1].name if mixed else ""
    finally:
        for layer, policy in mixed:
            if layer.dtype_policy == plain:  # else it was quantized
                layer.dtype_policy = policy


def _is_mixed(policy: Any) -> bool:
    """Return whether a policy computes in 16 bits with variables of 32."""
    return policy.name in ("mixed_float16", "mixed_bfloat16")


def _set_policy(layer: Any, policy: Any, before: str, kept: Collection[Any]) -> None:
    if layer.dtype_policy.name != before or any(layer is each for each in kept):
        return
    layer.dtype_policy = policy
    for inner in flatten_layers(layer, recursive=False, include_self=False):
        _set_policy(inner, policy, before, kept)


def _layers_of(model: Any) -> list[Any]:
    """Return user-created layers; their inner layers were created under their policy."""
    found: list[Any] = []
    for layer in flatten_layers(model, recursive=False, include_self=False):
        found += _layers_of(layer) if isinstance(layer, keras.Model) else [layer]
    return [layer for layer in found if not isinstance(layer, keras.layers.InputLayer)]


def _is_from_config(layer: Any) -> bool:
    """Return whether a layer was loaded or cloned: its config includes `trainable`."""
    return "trainable" in constructor_arguments(layer)
