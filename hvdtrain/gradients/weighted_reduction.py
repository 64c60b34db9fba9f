"""The weighted mean of gradients over all replicas: sum(weight x gradient) / sum(weight)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.gradients.reduction import Gradient, GradientReducer, ReductionOptions, scaled

TOTALS = "/totals"
"""Path of the totals among those of gradients: no variable has one that begins with a slash."""


class WeightedReducer:
    """Reduces each replica's weighted gradient sums; the weights travel in the same exchange.

    Args:
        collectives: the replicas.
        options: how gradients travel. With `average` the result is the gradient of the mean over all weights, with
            `sum` that times the number of replicas; `adasum` combines the replicas' own means (Maleki et al. 2020).
        reducer: adds gradients up; by default a `GradientReducer`.
    """

    def __init__(
        self,
        collectives: Collectives,
        options: ReductionOptions | None = None,
        reducer: GradientReducer | None = None,
    ) -> None:
        options = options or ReductionOptions()
        self._collectives = collectives
        self._op = options.reduce_op
        # An average is formed here, by weights: what travels is a sum.
        sums = replace(options, reduce_op="sum") if self._op == "average" else options
        self._reducer = reducer or GradientReducer(collectives, sums)

    def reduce(
        self,
        sums: Sequence[Gradient],
        totals: tf.Tensor,
        paths: Sequence[str],
        *,
        weight_at: int = 0,
        expected: Any = 1.0,
        uniform: bool = False,
        role: str = "gradient",
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Return the weighted mean of the gradients, and the sum of `totals` over all replicas.

        Args:
            sums: this replica's sum of weight x gradient, divided by `expected`, for each variable.
            totals: a vector to add up over the replicas along with the gradients.
            paths: the path of each gradient's variable.
            weight_at: where in `totals` this replica's sum of weights is.
            expected: what `sums` were divided by beforehand, the same on every replica.
            uniform: whether the weights of all replicas add up to `expected`: the sums are the mean already.
            role: tells apart several reductions of the same variables.
        """
        if self._op == "adasum":
            own = _times(sums, _ratio(expected, totals[weight_at]))
            reduced = self._reducer.reduce(own, paths, role=role)
            return reduced, self._collectives.all_reduce(totals, name=f"{role}/{TOTALS}")
        totals, *gradients = self._reducer.reduce(
            [after(totals, sums), *sums], [TOTALS, *paths], role=role, exact=[TOTALS]
        )
        # Dividing here would be one more pass over all gradients: where it can be, it was done to the loss.
        if not uniform:
            gradients = _times(gradients, _ratio(expected, totals[weight_at]))
        if self._op == "sum":
            gradients = _times(gradients, float(self._collectives.size))
        return gradients, totals


def after(totals: tf.Tensor, gradients: Sequence[Gradient]) -> tf.Tensor:
    """Hold the totals back until the last gradient is there.

    Sent as soon as the loss is known, they would make a message of their own: on a step of 4 ms that costs 5 %.
    """
    last = next((g for g in gradients if g is not None), totals)
    with tf.control_dependencies([last.values if isinstance(last, tf.IndexedSlices) else last]):
        return tf.identity(totals)


def _times(gradients: Sequence[Gradient], factor: tf.Tensor | float) -> list[Gradient]:
    return [scaled(gradient, factor) for gradient in gradients]


def _ratio(expected: Any, weight: tf.Tensor) -> tf.Tensor:
    """Return expected / weight in float64, as gradients may have 64 bits where weights have 32; 0 for no weight."""
    return tf.math.divide_no_nan(tf.cast(expected, tf.float64), tf.cast(weight, tf.float64))
