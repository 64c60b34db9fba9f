"""Verify that what each rank counts of its positions may be added up over ranks."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras import (
    compile_metrics,
    compiled_losses,
    compiled_metrics,
    function_of_metric,
)
from hvdtrain.compat.seams import METRIC
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.parallel.context.positions import POSITION_DIM, Positions, with_positions
from hvdtrain.training.step.loss_terms import LossTerms

TOLERANCE = 1e-3


class _Call(NamedTuple):
    """A call of a metric's `update_state`."""

    metric: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def _noting(metric: Any, calls: list[_Call]) -> Callable[..., Any]:
    original = METRIC.active(metric)

    def update_state(*args: Any, **options: Any) -> Any:
        calls.append(_Call(metric, args, options))
        return original(*args, **options)

    return update_state


def _differs(found: Any, expected: Any) -> tf.Tensor:
    return tf.reduce_any(abs(found - expected) > TOLERANCE * (abs(expected) + 1e-6))


def _is_of_keras(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == keras.__name__


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
    if _differs(tf.add_n([_loss(model, replicas, targets, shard, share=1 / ranks) for shard in shards]), whole):
        raise ConfigError(
            f"The loss looks at several positions, of which each rank along cp={ranks} has a slice: it must have a "
            f"value for each position. Use another loss, or leave cp out of {opt('parallel')}."
        )
    total = _counted(model, replicas, targets, [outputs])
    parts = _counted(model, replicas, targets, shards)
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


class _Counted(NamedTuple):
    """State of a metric after the outputs of some samples."""

    state: list[np.ndarray]
    call: _Call
    """The last update, of targets and outputs."""


def _counted(model: Any, replicas: Collectives, targets: Any, parts: Sequence[Any]) -> list[_Counted]:
    """Return what each compiled metric counts of `parts`."""
    container, metrics = compile_metrics(model), compiled_metrics(model)
    if container is None:
        return []
    container.reset_state()
    before = [np.asarray(variable) for variable in container.variables]
    calls: list[_Call] = []
    with ExitStack() as stack:
        for metric in metrics:
            stack.enter_context(METRIC.replaced(metric, _noting(metric, calls)))
        stack.enter_context(_terms(model, replicas, 1.0).corrected())
        for outputs in parts:
            container.update_state(targets, outputs)
    changes = [np.asarray(v, np.float64) - old for v, old in zip(container.variables, before, strict=True)]
    container.reset_state()
    counts = iter(changes)
    last = {id(call.metric): call for call in calls}
    return [_Counted([next(counts) for _ in metric.variables], last[id(metric)]) for metric in metrics]


def _adds_up(metric: Any, mine: _Counted, theirs: _Counted) -> bool:
    """Return whether a metric is additive over sequence shards.

    Keras uses the mean over a sample's positions, which is the mean of the means over equal shards. For a user's
    metric, its sums must be sums over positions.
    """
    if not any(_differs(a, b) for a, b in zip(mine.state, theirs.state, strict=True)):
        return True
    function = function_of_metric(metric)
    if function is None or not _is_of_keras(type(metric)):
        return False
    means = [tf.math.divide_no_nan(*each.state) for each in (mine, theirs)]
    return not _differs(*means) and (_is_of_keras(function) or _has_positions(function, *theirs.call.args[:2]))


def _has_positions(function: Any, targets: Any, output: Any) -> bool:
    """Return whether a loss or metric function returns values per position."""
    values = tf.convert_to_tensor(function(targets, output))
    return values.shape.rank > POSITION_DIM and values.shape[POSITION_DIM] == output.shape[POSITION_DIM]
