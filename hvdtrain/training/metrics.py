"""Keras metrics over all replicas: their variables are added up, never their results."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.variables import unwrap

ACCURACY = "accuracy"


class MetricSet:
    """A list of metrics that is updated by each replica and read as one.

    Args:
        metrics: Keras metrics or their names; which accuracy `accuracy` means, the first batch tells (`settle`).
        backend: the replicas whose variables are added up.

    Raises:
        ConfigError: an unknown name, or two metrics of one name.
    """

    def __init__(self, metrics: Sequence[Any], backend: Backend) -> None:
        self.metrics: list[Any] = [_metric(metric) for metric in metrics]
        names = [_name(metric) for metric in self.metrics]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise ConfigError(f"Two metrics are named {twice[0]!r}: give one another name.")
        self._backend = backend

    def reset(self) -> None:
        """Forget everything that was counted."""
        for metric in self.metrics:
            metric.reset_state()

    def update(self, targets: Any, outputs: Any, sample_weight: Any, present: tf.Tensor | float) -> None:
        """Count a batch on this replica, unless it is the placeholder of a replica without samples."""

        if not self.metrics:
            return

        def count() -> tf.Tensor:
            for metric in self.metrics:
                metric.update_state(targets, outputs, sample_weight=sample_weight)
            return tf.constant(True)

        if tf.is_tensor(present):
            tf.cond(present > 0, count, lambda: tf.constant(False))
        elif present:
            count()

    def reduce(self, role: str) -> None:
        """Replace every metric's variables by their sums over the replicas, within a compiled function."""
        for number, metric in enumerate(self.metrics):
            for place, variable in enumerate(metric.variables):
                tensor = unwrap(variable)
                name = f"{role}/{number}.{metric.name}/{place}"
                tensor.assign(self._backend.all_reduce(tensor.read_value(), name=name))

    def results(self) -> dict[str, float]:
        """Return each metric's value by name."""
        return {metric.name: float(metric.result()) for metric in self.metrics}

    def measure(
        self, targets: Any, outputs: Any, sample_weight: Any, present: tf.Tensor | float
    ) -> dict[str, tf.Tensor]:
        """Return the metrics of one global batch, of which each replica has its part, within a compiled function."""
        self.reset()
        self.update(targets, outputs, sample_weight, present)
        self.reduce("train_metric")
        return {metric.name: tf.convert_to_tensor(metric.result()) for metric in self.metrics}

    def settle(self, targets: Any, outputs: Any) -> None:
        """Choose the accuracy that fits a first batch, and refuse a metric whose state is no sum.

        One that counts A, then B, must hold the sum of what it holds after A and after B alone.

        Args:
            targets: targets of a batch, with at least two samples for the check.
            outputs: the model's outputs for them.

        Raises:
            ConfigError: naming the metric.
        """
        self.metrics = [_accuracy_for(targets, outputs) if metric == ACCURACY else metric for metric in self.metrics]
        half = int(tf.nest.flatten(outputs)[0].shape[0]) // 2
        if half == 0:
            return
        parts = [tf.nest.map_structure(lambda t, s=s: t[s], (targets, outputs)) for s in _halves(half)]
        for metric in self.metrics:
            if type(metric).__module__.split(".")[0] == "keras":
                continue
            first, second, both = (_state_after(metric, batches) for batches in ([parts[0]], [parts[1]], parts))
            if not all(_close(a + b, c) for a, b, c in zip(first, second, both, strict=True)):
                raise ConfigError(
                    f"The metric {metric.name!r} cannot be added up over ranks: its state is no sum over samples. "
                    "Keep sums and counts in its variables and form the value in result()."
                )


def _close(a: tf.Tensor, b: tf.Tensor) -> bool:
    return bool(tf.reduce_all(abs(a - b) <= 1e-3 * (abs(b) + 1e-6)))


def _halves(half: int) -> tuple[slice, slice]:
    return slice(0, half), slice(half, 2 * half)


def _state_after(metric: Any, batches: Sequence[tuple[Any, Any]]) -> list[tf.Tensor]:
    """Return the metric's state after `batches`, less what it holds when empty."""
    metric.reset_state()
    empty = [tf.cast(unwrap(v), tf.float64) for v in metric.variables]
    for targets, outputs in batches:
        metric.update_state(targets, outputs)
    state = [tf.cast(unwrap(v), tf.float64) - zero for v, zero in zip(metric.variables, empty, strict=True)]
    metric.reset_state()
    return state


def _name(metric: Any) -> str:
    return metric if isinstance(metric, str) else str(metric.name)


def _accuracy_for(targets: Any, outputs: Any) -> Any:
    """Return the accuracy that Keras means by the name: binary, categorical or sparse, by the shapes."""
    if outputs.shape[-1] == 1:
        return keras.metrics.BinaryAccuracy(name=ACCURACY)
    if targets.shape.rank == outputs.shape.rank and targets.shape[-1] == outputs.shape[-1]:
        return keras.metrics.CategoricalAccuracy(name=ACCURACY)
    return keras.metrics.SparseCategoricalAccuracy(name=ACCURACY)


def _metric(metric: Any) -> Any:
    if metric in (ACCURACY, "acc"):
        return ACCURACY
    try:
        built = keras.metrics.get(metric)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"Unknown metric {metric!r}: {error}") from error
    if isinstance(built, keras.metrics.Metric):
        return built
    return keras.metrics.MeanMetricWrapper(built, name=getattr(built, "__name__", str(metric)))


def fresh_metrics(metrics: Sequence[Any]) -> list[Any]:
    """Return new metrics with the configuration of `metrics` and nothing counted.

    Raises:
        ConfigError: a metric that cannot be made from its own configuration.
    """
    fresh = []
    for metric in metrics:
        try:
            fresh.append(type(metric).from_config(metric.get_config()))
        except (TypeError, NotImplementedError, ValueError) as error:
            raise ConfigError(
                f"The metric {metric.name!r} cannot be copied for evaluation: give {type(metric).__name__} a "
                f"get_config() with its constructor's arguments ({error})."
            ) from error
    return fresh
