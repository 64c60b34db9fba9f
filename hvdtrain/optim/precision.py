"""Mixed precision: 16-bit computation, 32-bit master weights, and the scaling of the loss that fp16 needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.precision import PrecisionName


@keras.saving.register_keras_serializable(package="hvdtrain")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """Keras' dynamic loss scaling, to be given reduced gradients that are still scaled.

    A reduced gradient is not finite where one replica's is not, so all replicas skip a step together and their scales
    stay equal. Other than Keras' own it looks at the rows of sparse gradients without making them dense.
    """

    def check_finite(self, grads: Any) -> Any:
        """Tell whether all gradients are finite."""
        parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in grads if g is not None]
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(part)) for part in parts])


def with_loss_scaling(optimizer: Any, model: Any) -> Any:
    """Wrap `optimizer` in loss scaling if a layer of `model` computes in fp16 and it is not wrapped yet."""
    if has_dynamic_scale(optimizer) or not computes_in_float16(model):
        return optimizer
    return LossScaleOptimizer(optimizer)


def computes_in_float16(model: Any) -> bool:
    """Tell whether any layer of a built model computes in fp16."""
    return any(layer.compute_dtype == "float16" for layer in (model, *model._flatten_layers(include_self=False)))


def has_dynamic_scale(optimizer: Any) -> bool:
    """Tell whether `optimizer` looks for the loss scale by itself, skipping steps whose gradients overflow."""
    return isinstance(optimizer, keras.optimizers.LossScaleOptimizer)


def loss_scale_of(optimizer: Any) -> Any:
    """Return what `optimizer` expects the loss to be multiplied by: a scalar tensor or a number."""
    if has_dynamic_scale(optimizer):
        return tf.convert_to_tensor(optimizer.dynamic_scale)
    return optimizer.loss_scale_factor or 1.0


@contextmanager
def precision(name: PrecisionName) -> Iterator[None]:
    """Build layers with the dtype policy `name`: their variables stay float32."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
