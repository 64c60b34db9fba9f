"""Clipping of gradients, dense and sparse."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError


@dataclass(frozen=True)
class Clipping:
    """Bounds on the gradient of the whole batch; None where there is no bound.

    Keras' optimizers clip as well, but not sparse gradients, and not on the unscaled gradient of 16-bit training
    unless the optimizer is within a LossScaleOptimizer.
    """

    norm: float | None = None
    """Bound on the L2 norm over all variables together (Pascanu et al. 2013)."""
    value: float | None = None
    """Bound on the size of each element."""

    def __post_init__(self) -> None:
        for name, bound in (("norm", self.norm), ("value", self.value)):
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise ConfigError(f"--clip-{name} must be a positive number. Received: {bound}.")
        if self.norm is not None and self.value is not None:
            raise ConfigError("Clip by norm or by value, not both: leave out --clip-norm or --clip-value.")

    def apply(self, gradients: Sequence[Any], norm: tf.Tensor | None, scale: Any = 1.0) -> list[Any]:
        """Return `gradients` within the bounds times `scale`; `norm` is their global norm, where it is bounded."""
        if self.norm is not None:
            return clip_by_norm(gradients, norm, scale * self.norm)
        if self.value is not None:
            return clip_by_value(gradients, scale * self.value)
        return list(gradients)


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the L2 norm over all gradients together, a float64 scalar; None among them counts nothing.

    The rows of a sparse gradient must have different indices, as those of an exchange do.
    """
    return tf.sqrt(square_sum(gradients))


def square_sum(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the sum of all elements' squares, a float64 scalar; see `global_norm`."""
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    squares = [tf.cast(tf.reduce_sum(tf.square(part)), tf.float64) for part in parts]
    return tf.add_n(squares) if squares else tf.constant(0.0, tf.float64)


def clip_by_norm(gradients: Sequence[Any], norm: Any, bound: Any) -> list[Any]:
    """Scale `gradients`, whose global norm is `norm`, so that it is at most `bound`; NaN and inf stay what they are."""
    bound = tf.cast(bound, norm.dtype)
    factor = bound / tf.maximum(norm, bound)
    return [_on_values(g, lambda t: t * tf.cast(factor, t.dtype)) for g in gradients]


def clip_by_value(gradients: Sequence[Any], bound: Any) -> list[Any]:
    """Bring each element into [-bound, bound]; NaN and inf stay what they are, by which an overflow is known."""

    def clip(tensor: tf.Tensor) -> tf.Tensor:
        limit = tf.cast(bound, tensor.dtype)
        return tf.where(tf.math.is_finite(tensor), tf.clip_by_value(tensor, -limit, limit), tensor)

    return [_on_values(gradient, clip) for gradient in gradients]


def _on_values(gradient: Any, function: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)
