"""Verify that what each rank counts of its own samples or positions may be added up, or averaged, over ranks."""

from collections.abc import Callable, Iterator, Sequence
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
    flatten_layers,
    function_of_metric,
    own_non_trainable_variables,
)
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.data.batch import Batch
from hvdtrain.parallel.context.positions import POSITION_DIM, Positions, with_positions
from hvdtrain.state.layer_states import untracked_variables
from hvdtrain.state.structure import statistics_of
from hvdtrain.state.variables import path_of, unwrap
from hvdtrain.training.step.logs import metrics_of
from hvdtrain.training.step.loss_terms import LossTerms
from hvdtrain.training.step.patches import active, replaced
from hvdtrain.training.step.probing import draws, exchanges, halves_of, unchanged

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
    metrics = [m for m in (*metrics_of(model), *compiled_metrics(model)) if not _is_metric_of_keras(m) and m.variables]
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
    one, other, both = (_state_after(call, slice(*bounds)) for bounds in ((0, half), (half, 2 * half), (0, 2 * half)))
    differs = [_differs(a + b - zero, c) for a, b, c, zero in zip(one, other, both, empty, strict=True)]
    return tf.logical_and(half > 0, tf.reduce_any(differs))


def _state_after(call: _Call, samples: slice) -> list[tf.Tensor]:
    def cut(each: Any) -> Any:
        return each[samples] if tf.is_tensor(each) and each.shape.rank else each

    args, options = tf.nest.map_structure(cut, (call.args, call.options))
    before = call.metric.stateless_reset_state()
    return [tf.cast(v, tf.float64) for v in call.metric.stateless_update_state(before, *args, **options)]


def _differs(found: Any, expected: Any) -> tf.Tensor:
    return tf.reduce_any(abs(found - expected) > TOLERANCE * (abs(expected) + 1e-6))


def _is_metric_of_keras(metric: Any) -> bool:
    function = function_of_metric(metric)
    return _is_of_keras(type(metric)) and (function is None or _is_of_keras(function))


def _is_of_keras(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).split(".")[0] == keras.__name__


def check_states(model: Any, batch: Batch, step: Callable[[Batch], Any]) -> None:
    """Reject states of layers that are no means over samples, such as a largest value, unless the layer says how.

    The state after a batch must be the mean of those after its halves; `add_weight(aggregation="mean")` says that a
    mean will do, as for the variances of a normalization, and `"only_first_replica"` that rank 0's is that of all.

    Args:
        batch: a representative one.
        step: computes a batch as in training, without changing weights.

    Raises:
        ConfigError: naming the layer and the variable.
    """
    found = list(_states_without_aggregation(model))
    parts = halves_of(batch)
    if not found or parts is None:
        return

    def states(batch: Batch) -> list[tf.Tensor]:
        step(batch)
        return [tf.cast(unwrap(variable).read_value(), tf.float64) for _, variable in found]

    compute = compiled(states)
    graph = compute.get_concrete_function(parts[0]).graph
    if draws(graph) or exchanges(graph):
        return
    results = []
    for part in parts:
        with unchanged(model, graph):
            results.append(compute(part))
    for (layer, variable), one, other, both in zip(found, *results, strict=True):
        if _differs((one + other) / 2, both):
            raise ConfigError(
                f"{type(layer).__name__} {layer.name!r} updates {path_of(variable)} from the samples of its rank, "
                "and the mean over the ranks is not its value for all samples. Say what it shall be: "
                'add_weight(…, aggregation="mean") if the mean will do, or "only_first_replica"; or exchange it in the '
                "layer, as by hvdtrain.allreduce(x, op=hvdtrain.horovod.Max)."
            )


def check_untracked(model: Any, batch: Batch, step: Callable[[Batch], Any]) -> None:
    """Reject variables of which Keras does not know, such as a tf.Variable, that a layer updates from its samples.

    Arguments as for `check_states`. Raises ConfigError naming the layer and the variable.
    """
    found = [
        (layer, path, variable)
        for layer in {id(layer): layer for layer in flatten_layers(model)}.values()
        for path, variable in untracked_variables(layer).items()
    ]
    parts = halves_of(batch)
    if not found or parts is None:
        return

    def states(batch: Batch) -> list[tf.Tensor]:
        step(batch)
        return [variable.read_value() for *_, variable in found]

    compute = compiled(states)
    graph = compute.get_concrete_function(parts[0]).graph
    if exchanges(graph):
        return
    results = []
    for part in parts[:2]:
        with unchanged(model, graph):
            results.append(compute(part))
    for (layer, path, _), one, other in zip(found, *results, strict=True):
        if not np.array_equal(one, other):
            raise ConfigError(
                f"{type(layer).__name__} {layer.name!r} updates {path!r} from the samples of its rank, and Keras does "
                "not know of this variable: each rank would go on with its own. Make it a weight of the layer, "
                'self.add_weight(…, trainable=False, aggregation="mean"), or exchange it in the layer, as by '
                "hvdtrain.allreduce."
            )


def _states_without_aggregation(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield layers that are not Keras' own with the states for which they name no aggregation."""
    for layer in {id(layer): layer for layer in flatten_layers(model)}.values():
        if type(layer).__module__.split(".")[0] in ("keras", "hvdtrain"):
            continue
        averaged = {id(variable) for variable in statistics_of(layer)}
        for variable in own_non_trainable_variables(layer):
            known = getattr(variable, "aggregation", None) not in (None, "none")
            if id(unwrap(variable)) in averaged and not known and isinstance(variable, keras.Variable):
                yield layer, variable


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
            stack.enter_context(replaced(metric, "update_state", _noting(metric, calls)))
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
