"""Clipping of gradients, dense and sparse."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError


@dataclass(frozen=True)
class Clipping:
    """Bounds on the gradient of the global batch; None for no bound.

    Keras' own clipping skips sparse gradients, and clips scaled gradients unless the optimizer is inside a
    LossScaleOptimizer.
    """

    norm: float | None = None
    """Bound on the L2 norm over all variables together (Pascanu et al. 2013)."""
    value: float | None = None
    """Bound on the size of each element."""

    def __post_init__(self) -> None:
        for option, bound in (("--clip-norm", self.norm), ("--clip-value", self.value)):
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise ConfigError(f"{option} must be a positive number. Received: {bound}.")
        if self.norm is not None and self.value is not None:
            raise ConfigError("Clip by norm or by value, not both: leave out --clip-norm or --clip-value.")

    def apply(self, gradients: Sequence[Any], norm: tf.Tensor | None, scale: Any = 1.0) -> list[Any]:
        """Clip `gradients` to the bounds times `scale`; `norm` is their global norm, needed if it is bounded."""
        if self.norm is not None:
            return clip_by_norm(gradients, norm, scale * self.norm)
        if self.value is not None:
            return clip_by_value(gradients, scale * self.value)
        return list(gradients)


def global_norm(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the L2 norm over all gradients together, a float64 scalar; None counts as zero.

    The rows of a sparse gradient must have distinct indices, as after an exchange.
    """
    return tf.sqrt(square_sum(gradients))


def square_sum(gradients: Sequence[Any]) -> tf.Tensor:
    """Return the sum of all elements' squares, a float64 scalar; see `global_norm`."""
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    squares = [tf.cast(tf.reduce_sum(tf.square(part)), tf.float64) for part in parts]
    return tf.add_n(squares) if squares else tf.constant(0.0, tf.float64)


def clip_by_norm(gradients: Sequence[Any], norm: Any, bound: Any) -> list[Any]:
    """Scale `gradients` of global norm `norm` to a norm of at most `bound`; NaN and inf pass through."""
    bound = _as_scalar(bound, norm.dtype)
    factor = bound / tf.maximum(norm, bound)
    return [_on_values(g, lambda t: t * tf.cast(factor, t.dtype)) for g in gradients]


def clip_by_value(gradients: Sequence[Any], bound: Any) -> list[Any]:
    """Clip each element to [-bound, bound]; NaN and inf pass through, as they signal an overflow."""

    def clip(tensor: tf.Tensor) -> tf.Tensor:
        limit = _as_scalar(bound, tensor.dtype)
        return tf.where(tf.math.is_finite(tensor), tf.clip_by_value(tensor, -limit, limit), tensor)

    return [_on_values(gradient, clip) for gradient in gradients]


def _as_scalar(number: Any, dtype: tf.DType) -> tf.Tensor:
    # tf.cast would take a Python number through float32.
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def _on_values(gradient: Any, function: Any) -> Any:
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)
