"""Detection of bad steps before the update: NaN, infinity or a loss spike.

Each replica's flag is reduced with the step's totals, in the gradients' own messages. All replicas decide by the same
sums, and so agree without further communication.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers, own_non_trainable_variables
from hvdtrain.config.training import BadStepConfig
from hvdtrain.state.variables import unwrap
from hvdtrain.training.step.contract import LocalGradients
from hvdtrain.training.step.finite import poison_of

GOOD, NON_FINITE, SPIKE = 0, 1, 2
"""Verdicts on a step."""
HISTORY = 64
"""Good steps whose losses are compared with a new one."""
FEWEST = 16
"""Losses needed to estimate their spread."""
DEVIATION = 1.4826
"""Standard deviation / median absolute deviation of a normal distribution."""
LEAST_SPREAD = 0.01
"""Minimal standard deviation as a fraction of the median: with a nearly constant loss, small steps are not spikes."""


class GuardedTotals(NamedTuple):
    """Layout of a guarded step's totals: `LocalGradients.totals` and the guard's values."""

    loss: Any
    weight: Any
    data: Any
    gradient: Any
    """Zero, or NaN if a gradient is not finite."""
    verdict: Any
    limit: Any
    """Mean loss above which the step is a spike; infinite without a limit."""


VERDICT_PARTS = slice(2, 4)
"""Entries of the totals from `flagged` that are NaN if something is not finite."""


class StepGuard:
    """Judges steps by their totals, and skips updates of bad ones.

    `scaled` says whether dynamic loss scaling handles overflowing gradients: these are not bad.
    """

    def __init__(self, options: BadStepConfig, *, scaled: bool) -> None:
        self._threshold = options.spike_threshold
        self._scaled = scaled
        # Unused entries are infinite, so that they sort last.
        self._losses = tf.Variable(np.full(HISTORY, np.inf), trainable=False, dtype=tf.float64, name="recent_losses")
        self._count = tf.Variable(0, trainable=False, dtype=tf.int64, name="recent_losses_count")

    def begin(self, losses: Sequence[float]) -> None:
        """Restore the losses of earlier good steps, latest last."""
        kept = list(losses)[-HISTORY:]
        self._losses.assign([*kept, *[np.inf] * (HISTORY - len(kept))])
        self._count.assign(len(kept))

    def recent(self) -> list[float]:
        """Return the losses that the next step is compared with, latest last."""
        count, losses = int(self._count), self._losses.numpy()
        first = max(0, count - HISTORY)
        return [float(losses[number % HISTORY]) for number in range(first, count)]

    def flagged(self, local: LocalGradients) -> tuple[LocalGradients, tf.Tensor]:
        """Add to a replica's totals whether its gradients are finite.

        Also returns this replica's findings [3 + number of gradients]: its own totals, and per gradient zero, or NaN if
        it is not finite.
        """
        by_gradient = local.poison
        if by_gradient is None:
            by_gradient = tf.stack([poison_of(gradient) for gradient in local.gradients])
        all_of_them = tf.cast(tf.reduce_sum(by_gradient), local.totals.dtype)
        here = tf.concat([tf.cast(local.totals, tf.float32), by_gradient], 0)
        return local._replace(totals=tf.concat([local.totals, all_of_them[None]], 0)), here

    def unless_bad(self, totals: tf.Tensor, update: Callable[[], None]) -> tf.Tensor:
        """Call `update` if a step with these global totals is good; return its `GuardedTotals`."""
        loss, weight, _, gradient = tf.unstack(totals)
        mean = tf.math.divide_no_nan(tf.cast(loss, tf.float64), tf.cast(weight, tf.float64))
        finite = tf.math.is_finite(loss)
        if not self._scaled:
            finite = tf.logical_and(finite, tf.math.is_finite(gradient))
        limit = self._limit()
        verdict = tf.where(finite, tf.where(mean > limit, SPIKE, GOOD), NON_FINITE)
        good = tf.equal(verdict, GOOD)

        def taken() -> tf.Tensor:
            update()
            return tf.constant(True)

        tf.cond(good, taken, lambda: tf.constant(False))
        if self._threshold is not None:
            self._remember(mean, tf.logical_and(good, weight > 0))
        return tf.concat([totals, tf.stack([tf.cast(verdict, totals.dtype), tf.cast(limit, totals.dtype)])], 0)

    def _limit(self) -> tf.Tensor:
        """Return the mean loss above which a step is a spike."""
        unlimited = tf.constant(np.inf, tf.float64)
        if self._threshold is None:
            return unlimited
        losses, count = self._losses.read_value(), tf.minimum(self._count.read_value(), HISTORY)
        median = _median(losses, count)
        spread = DEVIATION * _median(tf.abs(losses - median), count)
        limit = median + self._threshold * tf.maximum(spread, LEAST_SPREAD * tf.abs(median))
        return tf.where(count >= FEWEST, limit, unlimited)

    def _remember(self, loss: tf.Tensor, counts: tf.Tensor) -> None:
        place = tf.equal(tf.range(HISTORY, dtype=tf.int64), self._count.read_value() % HISTORY)
        self._losses.assign(tf.where(tf.logical_and(place, counts), loss, self._losses.read_value()))
        self._count.assign_add(tf.cast(counts, tf.int64))


class VariableSnapshot:
    """Saves non-trainable variables so that a skipped step can restore them."""

    def __init__(self, variables: Iterable[Any]) -> None:
        self._variables = [unwrap(variable) for variable in variables]
        self._values = [variable.read_value() for variable in self._variables]

    def restore_if_bad(self, totals: tf.Tensor) -> None:
        """Restore the values if the step of these `GuardedTotals` is bad."""

        def restore() -> tf.Tensor:
            for variable, value in zip(self._variables, self._values, strict=True):
                variable.assign(value)
            return tf.constant(True)

        verdict = GuardedTotals(*tf.unstack(totals)).verdict
        tf.cond(verdict > 0, restore, lambda: tf.constant(False))


def untrained_variables(model: Any) -> list[tf.Variable]:
    """Return a model's non-trainable variables, which a forward pass may update."""
    return [unwrap(v) for layer in flatten_layers(model) for v in own_non_trainable_variables(layer)]


def _median(values: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """Return the median of the `count` smallest of `values`."""
    ordered, last = tf.sort(values), tf.maximum(count, 1) - 1
    return (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
