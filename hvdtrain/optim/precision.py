"""Mixed precision: 16-bit computation, 32-bit master weights, and loss scaling for fp16."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.precision import PrecisionName


@keras.saving.register_keras_serializable(package="hvdtrain")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Dynamic loss scaling, as in Keras, for reduced gradients; apply them still scaled.

    A reduced gradient is non-finite if any replica's is, so all replicas skip the same steps and their scales stay
    equal. Unlike Keras' own, it checks sparse gradients without making them dense.
    """

    def check_finite(self, grads: Any) -> Any:
        """Return whether all gradients are finite."""
        parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])


def with_loss_scaling(optimizer: Any, model: Any) -> Any:
    """Wrap `optimizer` in loss scaling if a layer of `model` computes in fp16, unless it is wrapped already."""
    if has_dynamic_scale(optimizer) or not computes_in_float16(model):
        return optimizer
    return LossScaleOptimizer(optimizer)


def computes_in_float16(model: Any) -> bool:
    """Whether any layer of a built model computes in fp16."""
    return any(layer.compute_dtype == "float16" for layer in (model, *model._flatten_layers(include_self=False)))


def has_dynamic_scale(optimizer: Any) -> bool:
    """Whether `optimizer` adapts the loss scale itself, skipping steps whose gradients overflow."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def loss_scale_of(optimizer: Any) -> Any:
    """Return the loss scale that `optimizer` expects: a scalar tensor or a number."""
    if has_dynamic_scale(optimizer):
        return tf.convert_to_tensor(optimizer.dynamic_scale)
    return optimizer.loss_scale_factor or 1.0


@contextmanager
def precision(name: PrecisionName) -> Iterator[None]:
    """Build layers under the dtype policy `name` inside this context; variables stay float32."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
