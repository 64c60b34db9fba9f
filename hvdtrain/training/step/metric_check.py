"""Verify that the state of users' metrics is a sum over samples, since it is added up over ranks."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.compat.keras import compiled_metrics, function_of_metric
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.step.logs import metrics_of
from hvdtrain.training.step.loss_kinds import unchanged
from hvdtrain.training.step.patches import active, replaced

TOLERANCE = 1e-3


class _Call(NamedTuple):
    """A call of a metric's `update_state`."""

    metric: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


def check_sums(model: Any, step: Callable[[], Any]) -> None:
    """Reject a metric that is not Keras' own, whose state after samples A and B is not state(A) + state(B).

    So are functions that return one number for a whole batch.

    Args:
        model: compiled and built.
        step: computes a batch by the model's `train_step` or `test_step`, without changing weights; called within a
            compiled function, unless there are no such metrics.

    Raises:
        ConfigError: naming the metric.
    """
    metrics = [m for m in (*metrics_of(model), *compiled_metrics(model)) if not _of_keras(m) and m.variables]
    if not metrics:
        return
    calls: list[_Call] = []

    def violations() -> list[tf.Tensor]:
        calls.clear()
        with ExitStack() as stack:
            for metric in metrics:
                stack.enter_context(replaced(metric, "update_state", _noting(metric, calls)))
            step()
        return [_violates(call) for call in calls]

    compute = tf.function(violations, autograph=False).get_concrete_function()
    with unchanged(model, compute.graph):
        found = compute()
    for call, violates in zip(calls, found, strict=True):
        if violates:
            raise ConfigError(
                f"The metric {call.metric.name!r} cannot be summed over ranks: its state is not a sum over samples. "
                "Keep sums and counts in its variables and form the value in result(); a function must return a value "
                "for each sample."
            )


def _noting(metric: Any, calls: list[_Call]) -> Callable[..., Any]:
    original = active(metric, "update_state")

    def update_state(*args: Any, **options: Any) -> Any:
        calls.append(_Call(metric, args, options))
        return original(*args, **options)

    return update_state


def _violates(call: _Call) -> tf.Tensor:
    """Return whether the state after both halves of the samples is not the sum of those after each."""
    first = tf.nest.flatten((call.args, call.options))[0]
    if first is None or not tf.is_tensor(first) or first.shape.rank == 0:
        return tf.constant(False)
    half = tf.shape(first)[0] // 2
    empty = [tf.cast(v, tf.float64) for v in call.metric.stateless_reset_state()]
    one, other, both = (_state(call, slice(*bounds)) for bounds in ((0, half), (half, 2 * half), (0, 2 * half)))
    differs = [
        tf.reduce_any(abs(a + b - zero - c) > TOLERANCE * (abs(c) + 1e-6))
        for a, b, c, zero in zip(one, other, both, empty, strict=True)
    ]
    return tf.logical_and(half > 0, tf.reduce_any(differs))


def _state(call: _Call, samples: slice) -> list[tf.Tensor]:
    def cut(each: Any) -> Any:
        return each[samples] if tf.is_tensor(each) and each.shape.rank else each

    args, options = tf.nest.map_structure(cut, (call.args, call.options))
    before = call.metric.stateless_reset_state()
    return [tf.cast(v, tf.float64) for v in call.metric.stateless_update_state(before, *args, **options)]


def _of_keras(metric: Any) -> bool:
    function = function_of_metric(metric)
    return all(_is_keras(each) for each in (type(metric), function) if each is not None)


def _is_keras(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == keras.__name__
