"""Keras batch normalization by TensorFlow's fused op.

Keras 3 writes training-mode normalization as a dozen elementwise ops, and so is its gradient. The fused op saves a
fifth of the step time of ResNet-20 in float32 on one core (`benchmarks/fused.py` times the layer alone).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.compat.seams import LAYER_CALL

WIDENED = (tf.float16, tf.bfloat16)
"""Dtypes that Keras normalizes in float32 and casts back."""
LEAST_EPSILON = 1e-5
"""Minimal epsilon of cuDNN."""


def fusible_layers(model: Any) -> list[Any]:
    """Return the layers, also nested, that the fused op supports in training.

    Of Keras' own class, over the last axis, with float32 variables, without `renorm` and `synchronized`.
    """
    return [layer for layer in flatten_layers(model) if _is_fusible(layer)]


def _is_fusible(layer: Any) -> bool:
    return (
        type(layer) is keras.layers.BatchNormalization
        and not (layer.renorm or layer.synchronized)
        and layer.variable_dtype == "float32"
        and layer.epsilon >= LEAST_EPSILON
    )


@contextmanager
def fused_normalization(layers: Sequence[Any]) -> Iterator[None]:
    """Use the fused op in training calls of `layers` inside this context.

    Outputs, gradients and moving statistics equal Keras' up to rounding. Keras' own code still handles inference,
    frozen layers, masks, float64, and tf.distribute strategies.
    """
    with ExitStack() as fused:
        for layer in () if tf.distribute.has_strategy() else layers:
            fused.enter_context(_fused(layer))
        yield


@contextmanager
def _fused(layer: Any) -> Iterator[None]:
    if LAYER_CALL.is_taken(layer):
        yield
        return
    with LAYER_CALL.replaced(layer, _call_of(layer, LAYER_CALL.active(layer))):
        yield


def _call_of(layer: Any, written_out: Callable[..., Any]) -> Callable[..., Any]:
    def call(inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        fits = inputs.dtype in (tf.float32, *WIDENED) and layer.axis in (-1, len(inputs.shape) - 1)
        if training and layer.trainable and mask is None and fits:
            return tf.cast(_normalized(layer, tf.cast(inputs, tf.float32)), layer.compute_dtype)
        return written_out(inputs, training=training, mask=mask)

    return call


def _normalized(layer: Any, inputs: tf.Tensor) -> tf.Tensor:
    """Normalize float32 inputs [..., channels], and update the moving statistics."""
    channels = inputs.shape[-1]
    images = inputs if inputs.shape.rank == 4 else tf.reshape(inputs, [-1, 1, 1, channels])
    outputs, mean, unbiased, *_ = tf.raw_ops.FusedBatchNormV3(
        x=images,
        scale=layer.gamma.value if layer.scale else tf.ones([channels]),
        offset=layer.beta.value if layer.center else tf.zeros([channels]),
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        epsilon=layer.epsilon,
        is_training=True,
    )
    count = tf.cast(tf.size(inputs) // channels, tf.float32)
    # Keras keeps the biased variance; the op returns the unbiased one.
    variance = unbiased * (count - 1.0) / count
    for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        moving.assign(moving.value * layer.momentum + new * (1.0 - layer.momentum))
    return outputs if inputs.shape.rank == 4 else tf.reshape(outputs, tf.shape(inputs))
