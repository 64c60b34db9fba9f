"""Compensation of stale gradients: what a server makes of a gradient of old parameters.

w are the present parameters, w' those that the gradient g was computed at, tau the updates between them.

- `rate` (Zhang et al. 2015, arXiv:1511.05950): the learning rate is divided by tau.
- `dc_asgd` (Zheng et al. 2017, arXiv:1609.08326, equation 10): g + lambda g^2 (w - w').
- `adaptive` (the same, section 5): lambda is lambda_0 / sqrt(s + 1e-7), with the mean square s <- m s + (1 - m) g^2,
  of a table in the rows that have a gradient.
"""

from collections.abc import Mapping

import tensorflow as tf

from hvdtrain.training.update_rules.servers.layout import Entry

STRENGTHS = {"dc_asgd": 0.04, "adaptive": 2.0}
"""lambda and lambda_0 of Zheng et al."""
MEMORY, EPSILON = 0.95, 1e-7


class DelayCompensation:
    """DC-ASGD on one server's variables."""

    def __init__(self, name: str, strength: float | None, entries: list[Entry]) -> None:
        self._strength = STRENGTHS[name] if strength is None else strength
        self._squares: Mapping[str, tf.Variable] = {}
        if name == "adaptive":
            self._squares = {e.path: tf.Variable(tf.zeros(e.shape, e.dtype), trainable=False) for e in entries}

    def __call__(
        self, path: str, gradient: tf.Tensor | tf.IndexedSlices, now: tf.Tensor, before: tf.Tensor
    ) -> tf.Tensor | tf.IndexedSlices:
        """Return the compensated gradient of the variable `path`, whose values are `now` and were `before`."""
        if isinstance(gradient, tf.IndexedSlices):
            rows = gradient.indices
            values = self._of(path, gradient.values, tf.gather(now - before, rows), rows=rows)
            return tf.IndexedSlices(values, rows, gradient.dense_shape)
        return self._of(path, gradient, now - before)

    def _of(self, path: str, gradient: tf.Tensor, moved: tf.Tensor, *, rows: tf.Tensor | None = None) -> tf.Tensor:
        squared = tf.square(gradient)
        strength = tf.constant(self._strength, gradient.dtype)
        if path in self._squares:
            kept = self._squares[path]
            mean = MEMORY * (kept if rows is None else tf.gather(kept, rows)) + (1 - MEMORY) * squared
            kept.assign(mean) if rows is None else kept.scatter_update(tf.IndexedSlices(mean, rows))
            strength = strength / tf.sqrt(mean + EPSILON)
        return gradient + strength * squared * moved
