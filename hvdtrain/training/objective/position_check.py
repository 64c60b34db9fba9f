"""Verify that loss and metrics treat positions independently, for cp."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import function_of_metric
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.context.positions import POSITION_DIM, Positions, with_positions
from hvdtrain.training.objective.losses import LossFunction
from hvdtrain.training.objective.metrics import MetricSet

TOLERANCE = 1e-3
Sample = tuple[Any, Any]
"""Targets and outputs."""


def check_positions(loss: LossFunction, metrics: MetricSet, targets: Any, outputs: Any, ranks: int) -> None:
    """Reject a loss or metric that does not add up over shards. Raises ConfigError naming it."""
    slices = [(targets, _slices(outputs, Positions(index, ranks))) for index in range(ranks)]
    whole, *parts = (tf.stack(loss(*sample, None)[:2]) for sample in [(targets, outputs), *slices])
    if not _alike(tf.add_n(parts), whole):
        raise ConfigError(
            f"The loss looks at several positions, of which each rank along cp={ranks} has a slice: it must have a "
            f"value for each position. Use another loss, or leave cp out of {opt('parallel')}."
        )
    for number, bound in enumerate(metrics.bound):
        if not _adds_up(metrics, number, (targets, outputs), slices):
            raise ConfigError(
                f"The metric {bound.name!r} looks at several positions, of which each rank along cp={ranks} has a "
                f"slice: it must have a value for each position. Leave it out, or cp in {opt('parallel')}."
            )


def _slices(outputs: Any, positions: Positions) -> Any:
    return tf.nest.map_structure(lambda output: with_positions(output, positions), outputs)


def _adds_up(metrics: MetricSet, number: int, whole: Sample, slices: Sequence[Sample]) -> bool:
    """Return whether a metric is additive over sequence shards.

    Keras uses the mean over a sample's positions, which is the mean of the means over equal shards. For a user's
    metric, its sums must be sums over positions.
    """
    metric, output = metrics.bound[number].metric, metrics.bound[number].output
    function = function_of_metric(metric)
    mine, theirs = metrics.state_after(number, slices), metrics.state_after(number, [whole])
    if all(_alike(a, b) for a, b in zip(mine, theirs, strict=True)):
        return True
    if function is None or not _of_keras(type(metric)):
        return False
    means = [tf.math.divide_no_nan(total, count) for total, count in (mine, theirs)]
    return _alike(*means) and (_of_keras(function) or _has_positions(function, *metrics.of_output(output, *whole)))


def _of_keras(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == keras.__name__


def _has_positions(function: Any, targets: Any, output: Any) -> bool:
    """Return whether a loss or metric function returns values per position."""
    values = tf.convert_to_tensor(function(targets, output))
    return values.shape.rank > POSITION_DIM and values.shape[POSITION_DIM] == output.shape[POSITION_DIM]


def _alike(a: tf.Tensor, b: tf.Tensor) -> bool:
    return bool(tf.reduce_all(abs(a - b) <= TOLERANCE * (abs(b) + 1e-6)))
