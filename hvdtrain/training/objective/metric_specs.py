"""Metrics as for `Model.compile`: names, functions, objects, in lists or by output."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.models.objective import known_metrics, name_of_function, nearest
from hvdtrain.training.objective.metrics import BoundMetric, MetricSet, copy_of
from hvdtrain.training.objective.output_losses import output_losses
from hvdtrain.training.objective.outputs import ONLY, outputs_by_name, per_output

ACCURACIES = ("accuracy", "acc")
"""Names that depend on targets and outputs."""


class MetricSpec:
    """The user's metrics, resolved with a first batch.

    `metrics` are Keras metrics or their names; for several outputs a dict or list with one or several for each. Each of
    several losses is reported like a metric. Raises ConfigError for an unknown name.
    """

    def __init__(self, metrics: Any, weighted: Any, loss: Any = None) -> None:
        self._specs = [(_resolved(metrics), False), (_resolved(weighted), True)]
        self._loss = loss

    def resolve(self, targets: Any, outputs: Any, backend: Backend, names: Callable[[], Any]) -> MetricSet:
        """Return each output's metrics, with `accuracy` resolved from the shapes.

        Raises ConfigError for metrics that cannot be summed over replicas, or that fit no output.
        """
        by_name = outputs_by_name(outputs, names())
        labels = per_output("The target", targets, list(by_name), shared=False)
        losses = output_losses(self._loss, list(by_name))
        bound = [BoundMetric(loss.name, loss, output, weighted=True) for output, loss in losses.items()]
        metrics = self._bound(labels, by_name)
        # The order in which Keras' evaluate() returns them.
        bound += metrics if len(by_name) == 1 else sorted(metrics, key=lambda each: each.name)
        known = MetricSet(bound, backend, names)
        known.check_sums(targets, outputs)
        known.build(targets, outputs)
        known.fresh()  # rejects metrics that cannot be copied now, not at the first evaluation
        return known

    def _bound(self, labels: Mapping[str, Any], outputs: Mapping[str, Any]) -> list[BoundMetric]:
        """Return each output's metrics, under the names that Keras uses."""
        bound: list[BoundMetric] = []
        taken: dict[str, int] = {}
        for spec, weighted in self._specs:
            for output, metrics in _for_outputs(spec, list(outputs)).items():
                for metric in metrics:
                    made = _accuracy_for(metric, labels[output], outputs[output]) if isinstance(metric, str) else metric
                    if any(made is each.metric for each in bound):
                        made = copy_of(made)  # one object that is listed twice would count twice
                    name = _unique_name(output, made.name, weighted, taken)
                    bound.append(BoundMetric(name, made, output, weighted))
        return bound


def _for_outputs(spec: Any, names: list[str]) -> dict[str, list[Any]]:
    if names == [ONLY] and not isinstance(spec, dict):
        return {ONLY: tf.nest.flatten(spec)}
    if not spec:
        return {}
    metrics_of = per_output("metrics", spec, names, shared=False)
    return {output: [] if metrics is None else tf.nest.flatten(metrics) for output, metrics in metrics_of.items()}


def _resolved(metrics: Any) -> Any:
    structure = metrics if isinstance(metrics, dict | list | tuple) else [metrics]
    return tf.nest.map_structure(lambda one: None if one is None else _metric(one), structure)


def _unique_name(output: str, name: str, weighted: bool, taken: dict[str, int]) -> str:
    """Return Keras' name of a metric, and count it.

    The first has its plain name, then a weighted one has the prefix ``weighted_``; others are numbered.
    """
    prefix = "" if output == ONLY else f"{output}_"
    full = f"{prefix}{name}"
    if weighted and full in taken:
        full = f"{prefix}weighted_{name}"
    count = taken.get(full, 0)
    taken[full] = count + 1
    return f"{full}_{count}" if count else full


def _accuracy_for(name: str, targets: Any, outputs: Any) -> Any:
    """Return the accuracy that Keras infers from the shapes: binary, categorical or sparse."""
    if outputs.shape[-1] == 1:
        return keras.metrics.BinaryAccuracy(name=name)
    if targets.shape.rank == outputs.shape.rank and targets.shape[-1] == outputs.shape[-1]:
        return keras.metrics.CategoricalAccuracy(name=name)
    return keras.metrics.SparseCategoricalAccuracy(name=name)


def _metric(metric: Any) -> Any:
    if metric in ACCURACIES:
        return metric
    try:
        built = keras.metrics.get(metric)
    except TypeError as error:
        raise ConfigError(f"The metric {metric!r} needs arguments ({error}): give an object of it.") from error
    except ValueError as error:
        said = f".{nearest(metric, known_metrics())}" if isinstance(metric, str) else f": {error}"
        raise ConfigError(f"Unknown metric {metric!r}{said}") from error
    if not isinstance(built, keras.metrics.Metric):
        name = metric if isinstance(metric, str) else getattr(built, "name", None) or name_of_function(built)
        return keras.metrics.MeanMetricWrapper(built, name=name)
    # As in Model.compile: a metric requested as "mae" has that name in the logs.
    return type(built).from_config({**built.get_config(), "name": metric}) if isinstance(metric, str) else built
