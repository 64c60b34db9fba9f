"""Values returned by a model's own step, over all replicas."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import flatten_layers, own_metrics
from hvdtrain.config.errors import ConfigError
from hvdtrain.state.variables import unwrap
from hvdtrain.training.objective.metrics import BoundMetric, MetricSet
from hvdtrain.training.step.own.exchange import replaced


class Figure(NamedTuple):
    """Source of a value returned by a step."""

    metric: Any
    """The metric with this result; None for other tensors."""
    key: str | None
    """Name of the result, for a metric with several."""
    sums: tf.Variable | None
    """[2], for other tensors: this replica's sum of value x samples, and of samples."""

    def read(self) -> tf.Tensor:
        """Return the metric's current result."""
        result = self.metric.result()
        return tf.convert_to_tensor(result if self.key is None else result[self.key])


class StepLogs:
    """Global values of a step's results: metric results over all samples, other tensors averaged.

    A metric's result is computed from its variables summed over the replicas. Anything else is averaged over the
    replicas, weighted by samples.

    Args:
        step: `train_step` or `test_step`.
        accumulate: average other tensors over all batches since `reset`, not only the last one.
    """

    def __init__(self, backend: Backend, model: Any, step: str, *, accumulate: bool = False) -> None:
        self._backend = backend
        self._model = model
        self._step = step
        self._accumulate = accumulate
        self._figures: dict[str, Figure] = {}
        self._other: dict[str, tf.Variable] = {}
        self._seen: dict[int, tuple[Any, str | None, Any]] = {}

    @property
    def names(self) -> list[str]:
        """Names of the results, once traced."""
        return list(self._figures)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record which tensors are metric results, while a step is traced."""
        self._seen = {}
        with ExitStack() as stack:
            for metric in metrics_of(self._model):
                stack.enter_context(replaced(metric, "result", self._noting(metric)))
            yield

    def take(self, logs: Any, samples: tf.Tensor) -> list[tf.Tensor]:
        """Record the results of `samples` samples; return tensors to check.

        That is the loss; without one, all results named as losses, or else everything. Raises ConfigError if not a dict
        of single values.
        """
        values = {name: self._figure(name, value) for name, value in self._flat(logs).items()}
        self._figures = {}
        for name, (value, figure) in values.items():
            self._figures[name] = figure
            if figure.sums is not None:
                weight = tf.cast(samples, tf.float64)
                mine = tf.stack([tf.math.multiply_no_nan(tf.cast(value, tf.float64), weight), weight])
                (figure.sums.assign_add if self._accumulate else figure.sums.assign)(mine)
        self._seen = {}
        losses = [name for name in values if "loss" in name]
        watched = ["loss"] if "loss" in values else losses or list(values)
        return [values[name][0] for name in watched]

    def results(self, role: str) -> dict[str, tf.Tensor]:
        """Return the global results by name, without side effects. Collective."""
        metrics = self._metrics()
        found = metrics.results_so_far(role, self._read) if metrics.bound else {}
        others = {name: figure.sums for name, figure in self._figures.items() if figure.sums is not None}
        if others:
            sums = self._backend.all_reduce(tf.stack([v.read_value() for v in others.values()]), name=f"{role}//others")
            found |= dict(zip(others, tf.unstack(tf.math.divide_no_nan(sums[:, 0], sums[:, 1])), strict=True))
        return {name: found[name] for name in self._figures}

    def metric_sums(self, role: str) -> dict[str, list[tf.Tensor]]:
        """Return every metric's variables by name, summed over the replicas. Collective."""
        return self._metrics(everything=True).sums_so_far(role)

    def restore_sums(self, sums: Mapping[str, list[Any]]) -> None:
        """Restore the metrics' variables from `metric_sums`."""
        self._model.reset_metrics()
        for bound in self._metrics(everything=True).bound:
            for variable, value in zip(bound.metric.variables, sums.get(bound.name, ()), strict=False):
                variable.assign(tf.constant(value, variable.dtype))

    def reset(self) -> None:
        """Reset the model's metrics, like Keras per epoch, and other averages."""
        self._model.reset_metrics()
        for sums in self._other.values():
            sums.assign(tf.zeros_like(sums))

    def variables(self) -> list[tf.Variable]:
        """Return the metrics' variables."""
        found = {id(unwrap(v)): unwrap(v) for metric in metrics_of(self._model) for v in metric.variables}
        return list(found.values())

    def _noting(self, metric: Any) -> Any:
        def result(*args: Any, **kwargs: Any) -> Any:
            value = type(metric).result(metric, *args, **kwargs)
            for key, each in value.items() if isinstance(value, dict) else [(None, value)]:
                self._seen[id(each)] = metric, key, each
            return value

        return result

    def _flat(self, logs: Any) -> dict[str, Any]:
        if not isinstance(logs, dict):
            raise ConfigError(
                f"{self._step} of {type(self._model).__name__} must return a dict of metrics, such as "
                f"{{'loss': loss}}. Received: {logs!r}."
            )
        flat: dict[str, Any] = {}
        for name, value in logs.items():
            flat |= self._flat(value) if isinstance(value, dict) else {str(name): value}
        return flat

    def _figure(self, name: str, value: Any) -> tuple[tf.Tensor, Figure]:
        if id(value) in self._seen:
            metric, key, _ = self._seen[id(value)]
            return tf.convert_to_tensor(value), Figure(metric, key, None)
        try:
            given = tf.convert_to_tensor(value)
            tensor = tf.reshape(tf.cast(given, tf.float64), [])
            if given.dtype == tf.string:
                raise TypeError("text is not a number")
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self._step} of {type(self._model).__name__} must return one number for each name, such as "
                f"tf.reduce_mean(loss). Received for {name!r}: {value!r}."
            ) from error
        if name not in self._other:
            with tf.init_scope():
                self._other[name] = tf.Variable(tf.zeros([2], tf.float64), trainable=False, name="figure")
        return tensor, Figure(None, None, self._other[name])

    def _metrics(self, *, everything: bool = False) -> MetricSet:
        """Return the metrics behind the results, or all with variables."""
        chosen = {id(figure.metric): figure.metric for figure in self._figures.values() if figure.metric is not None}
        if everything:
            chosen = {id(metric): metric for metric in metrics_of(self._model) if metric.variables}
        bound: dict[str, BoundMetric] = {}
        for metric in chosen.values():
            name, count = metric.name, 1
            while (key := name if count == 1 else f"{name}#{count}") in bound:
                count += 1
            bound[key] = BoundMetric(key, metric, "", weighted=False)
        return MetricSet(list(bound.values()), self._backend)

    def _read(self) -> dict[str, tf.Tensor]:
        return {name: figure.read() for name, figure in self._figures.items() if figure.metric is not None}


def metrics_of(model: Any) -> list[Any]:
    """Return a model's metrics: those it resets, then others of it or its layers."""
    layers = flatten_layers(model)
    found = [*model.metrics, *(metric for layer in layers for metric in own_metrics(layer))]
    return list({id(metric): metric for metric in found}.values())


def plain_values(figures: Mapping[str, tf.Tensor]) -> dict[str, Any]:
    """Convert results to numbers, or to arrays if they have several values."""
    return {name: value.numpy() if value.shape.rank else float(value) for name, value in figures.items()}
