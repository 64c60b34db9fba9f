"""Verify that losses and metrics treat positions independently, for cp."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import compile_metrics, compiled_losses, compiled_metrics, function_of_metric
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.context.positions import POSITION_DIM, Positions, with_positions
from hvdtrain.training.step.loss_terms import LossTerms
from hvdtrain.training.step.patches import active, replaced

TOLERANCE = 1e-3


def check_positions(model: Any, replicas: Collectives, targets: Any, outputs: Any, ranks: int) -> None:
    """Reject a loss or metric of `compile` that does not add up over shards of the positions.

    Args:
        model: compiled and built.
        replicas: those of the session.
        targets: of some samples.
        outputs: the model's, over all positions.
        ranks: number of shards.

    Raises:
        ConfigError: naming it.
    """
    outputs = tf.nest.map_structure(tf.identity, outputs)
    shards = [
        tf.nest.map_structure(lambda output, place=place: with_positions(output, Positions(place, ranks)), outputs)
        for place in range(ranks)
    ]
    whole = _loss(model, replicas, targets, outputs)
    if not _alike(tf.add_n([_loss(model, replicas, targets, shard, share=1 / ranks) for shard in shards]), whole):
        raise ConfigError(
            f"The loss looks at several positions, of which each rank along cp={ranks} has a slice: it must have a "
            f"value for each position. Use another loss, or leave cp out of {opt('parallel')}."
        )
    total = _states(model, replicas, targets, [outputs])
    parts = _states(model, replicas, targets, shards)
    for metric, mine, theirs in zip(compiled_metrics(model), parts, total, strict=True):
        if not _adds_up(metric, mine, theirs):
            raise ConfigError(
                f"The metric {metric.name!r} looks at several positions, of which each rank along cp={ranks} has a "
                f"slice: it must have a value for each position. Leave it out, or cp in {opt('parallel')}."
            )


def _terms(model: Any, replicas: Collectives, share: float) -> LossTerms:
    samples, total = tf.constant(share, tf.float64), tf.ones([], tf.float64)
    return LossTerms(model=model, collectives=replicas, samples=samples, total=total, whole=False)


def _loss(model: Any, replicas: Collectives, targets: Any, outputs: Any, share: float = 1.0) -> tf.Tensor:
    """Return [2]: loss times weight, and weight, of a `share` of the positions."""
    terms = _terms(model, replicas, share)
    with terms.corrected():
        loss = compiled_losses(model)(targets, outputs)
    weight = terms.samples if terms.weight is None else terms.weight
    return tf.stack([tf.cast(loss, tf.float64) * weight, weight])


class _Counted:
    """What a metric has counted after the outputs of some samples."""

    def __init__(self, metric: Any) -> None:
        self.metric = metric
        self.state: list[tf.Tensor] = []
        self.seen: tuple[Any, Any] = (None, None)
        """The last targets and outputs."""


def _states(model: Any, replicas: Collectives, targets: Any, parts: Sequence[Any]) -> list[_Counted]:
    """Return each metric's state after `parts`, less that before."""
    container, counted = compile_metrics(model), [_Counted(metric) for metric in compiled_metrics(model)]
    if container is None:
        return []
    container.reset_state()
    before = [np.asarray(variable) for variable in container.variables]
    with ExitStack() as stack:
        for each in counted:
            stack.enter_context(replaced(each.metric, "update_state", _seeing(each)))
        stack.enter_context(_terms(model, replicas, 1.0).corrected())
        for outputs in parts:
            container.update_state(targets, outputs)
    changes = [np.asarray(v, np.float64) - old for v, old in zip(container.variables, before, strict=True)]
    container.reset_state()
    for each in counted:
        each.state, changes = changes[: len(each.metric.variables)], changes[len(each.metric.variables) :]
    return counted


def _seeing(counted: _Counted) -> Callable[..., Any]:
    original = active(counted.metric, "update_state")

    def update_state(y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        counted.seen = (y_true, y_pred)
        return original(y_true, y_pred, sample_weight=sample_weight)

    return update_state


def _adds_up(metric: Any, mine: _Counted, theirs: _Counted) -> bool:
    """Return whether a metric is additive over sequence shards.

    Keras uses the mean over a sample's positions, which is the mean of the means over equal shards. For a user's
    metric, its sums must be sums over positions.
    """
    if all(_alike(a, b) for a, b in zip(mine.state, theirs.state, strict=True)):
        return True
    function = function_of_metric(metric)
    if function is None or not _of_keras(type(metric)):
        return False
    means = [tf.math.divide_no_nan(*each.state) for each in (mine, theirs)]
    return _alike(*means) and (_of_keras(function) or _has_positions(function, *theirs.seen))


def _of_keras(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == keras.__name__


def _has_positions(function: Any, targets: Any, output: Any) -> bool:
    """Return whether a loss or metric function returns values per position."""
    values = tf.convert_to_tensor(function(targets, output))
    return values.shape.rank > POSITION_DIM and values.shape[POSITION_DIM] == output.shape[POSITION_DIM]


def _alike(a: Any, b: Any) -> bool:
    return bool(tf.reduce_all(abs(a - b) <= TOLERANCE * (abs(b) + 1e-6)))
