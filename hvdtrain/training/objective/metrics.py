"""Keras metrics over all replicas: their variables are added up, never their results."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.replicas import ForEachReplica
from hvdtrain.config.errors import ConfigError
from hvdtrain.state.variables import unwrap
from hvdtrain.training.objective.outputs import outputs_by_name, per_output


class BoundMetric(NamedTuple):
    """A metric, and the output that it measures."""

    name: str
    """What its value is called."""
    metric: Any
    output: str
    """Name of the model's output that it measures."""
    weighted: bool
    """Whether it is given the sample weights."""


class MetricSet:
    """Metrics updated on each replica and read over all of them.

    Args:
        bound: the metrics.
        backend: the replicas whose variables are added up.
        names: returns the names of the model's outputs.
    """

    def __init__(self, bound: Sequence[BoundMetric], backend: Backend, names: Callable[[], Any] = lambda: None) -> None:
        originals = list(bound)
        # Each replica counts in variables of its own, the first one in those of the originals.
        self._sets = ForEachReplica(backend, lambda place: _copies(originals) if place else originals)
        self._backend = backend
        self._names = names
        self._sample: tuple[Any, Any] | None = None

    @property
    def bound(self) -> list[BoundMetric]:
        """The metrics of the calling replica."""
        return self._sets.own

    def fresh(self) -> "MetricSet":
        """Return a reset copy of the metrics, for evaluation during training.

        Raises:
            ConfigError: a metric that cannot be recreated from its configuration.
        """
        fresh = MetricSet(_copies(self.bound), self._backend, self._names)
        if self._sample is not None:
            fresh.build(*self._sample)
        return fresh

    def build(self, targets: Any, outputs: Any) -> None:
        """Create the metrics' variables, and those of later copies: a strategy's replicas cannot create them."""
        targets, outputs = tf.nest.map_structure(lambda tensor: tensor[:1], (targets, outputs))
        self._sample = targets, outputs
        for bound in self._sets.all:
            self._count(bound, targets, outputs, None)
        self.reset_all()

    def reset(self) -> None:
        """Reset the metrics of this replica."""
        for bound in self.bound:
            bound.metric.reset_state()

    def reset_all(self) -> None:
        """Reset the metrics of all replicas of this process."""
        for bound in itertools.chain(*self._sets.all):
            bound.metric.reset_state()

    def update(self, targets: Any, outputs: Any, sample_weight: Any, has_samples: tf.Tensor | float) -> None:
        """Update the metrics of this replica, unless the batch is a placeholder."""
        if not self.bound:
            return

        def count() -> tf.Tensor:
            self._count(self.bound, targets, outputs, sample_weight)
            return tf.constant(True)

        if tf.is_tensor(has_samples):
            tf.cond(has_samples > 0, count, lambda: tf.constant(False))
        elif has_samples:
            count()

    def _count(self, bound: Sequence[BoundMetric], targets: Any, outputs: Any, sample_weight: Any) -> None:
        for metric, label, output, weight in self._arguments(bound, targets, outputs, sample_weight):
            metric.update_state(label, output, sample_weight=weight)

    def _arguments(self, bound: Sequence[BoundMetric], targets: Any, outputs: Any, sample_weight: Any) -> list[Any]:
        """Return each metric with the targets, outputs and weights to update it with."""
        by_name = outputs_by_name(outputs, self._names())
        labels = per_output("The target", targets, list(by_name), shared=False)
        weights = per_output("sample_weight", sample_weight, list(by_name), shared=True)
        return [
            (metric, labels[output], by_name[output], weights[output] if weighted else None)
            for _, metric, output, weighted in bound
        ]

    def sums_of(self, targets: Any, outputs: Any, sample_weight: Any) -> list[list[tf.Tensor]]:
        """Return the values of each metric's variables after this batch alone, without changing them."""
        shown = self._arguments(self.bound, targets, outputs, sample_weight)
        return [
            metric.stateless_update_state(
                [tf.zeros(v.shape, v.dtype) for v in metric.variables], label, output, sample_weight=weight
            )
            for metric, label, output, weight in shown
        ]

    def hold(self, sums: Sequence[Sequence[Any]] | None) -> None:
        """Set each metric's variables to sums of what `sums_of` returned; None sets them to zero."""
        self.reset_all()
        for bound, values in zip(self.bound, sums or [], strict=sums is not None):
            for variable, value in zip(bound.metric.variables, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))

    def take_up(self, sums: Mapping[str, Sequence[Any]]) -> None:
        """Set the variables of each metric to what `sums` have under its name, or to zero where there is none."""
        self.reset_all()
        for bound in self.bound:
            for variable, value in zip(bound.metric.variables, sums.get(bound.name, ()), strict=False):
                variable.assign(tf.constant(value, variable.dtype))

    def sums_so_far(self, role: str) -> dict[str, list[tf.Tensor]]:
        """Return the variables of each metric by its name, summed over the replicas, without changing any state."""
        return {
            bound.name: [
                self._backend.all_reduce(unwrap(variable).read_value(), name=f"{role}/{number}.{bound.name}/{place}")
                for place, variable in enumerate(bound.metric.variables)
            ]
            for number, bound in enumerate(self.bound)
        }

    def reduce(self, role: str) -> None:
        """Replace every metric's variables by their sums over the replicas, within a compiled function."""
        for number, bound in enumerate(self.bound):
            for place, variable in enumerate(bound.metric.variables):
                tensor = unwrap(variable)
                name = f"{role}/{number}.{bound.name}/{place}"
                tensor.assign(self._backend.all_reduce(tensor.read_value(), name=name))

    def results(self) -> dict[str, float]:
        """Return each metric's value by name."""
        return {bound.name: float(bound.metric.result()) for bound in self.bound}

    def reduced_results(self, role: str) -> dict[str, tf.Tensor]:
        """Return each metric's value over all replicas, within a compiled function."""
        self.reduce(role)
        return {bound.name: tf.convert_to_tensor(bound.metric.result()) for bound in self.bound}

    def results_so_far(self, role: str, read: Callable[[], Mapping[str, Any]] | None = None) -> dict[str, tf.Tensor]:
        """Return each metric's value over all replicas, within a compiled function, without changing any state.

        Args:
            role: see `reduce`.
            read: returns values by name, if not those of `results`.
        """
        variables = [unwrap(variable) for bound in self.bound for variable in bound.metric.variables]
        own = [variable.read_value() for variable in variables]
        self.reduce(role)
        found = read() if read else {bound.name: bound.metric.result() for bound in self.bound}
        results = {name: tf.convert_to_tensor(value) for name, value in found.items()}
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
        return results

    def check_sums(self, targets: Any, outputs: Any) -> None:
        """Refuse a metric whose state is not a sum: its state after A and B must be that after A plus that after B.

        Args:
            targets: targets of a batch; with one sample there is nothing to compare.
            outputs: the model's outputs for them.

        Raises:
            ConfigError: names the metric.
        """
        half = int(tf.nest.flatten(outputs)[0].shape[0]) // 2
        if half == 0:
            return
        parts = [tf.nest.map_structure(lambda t, s=s: t[s], (targets, outputs)) for s in _halves(half)]
        for number, bound in enumerate(self.bound):
            if type(bound.metric).__module__.split(".")[0] == "keras":
                continue
            first, second, both = (self._state_after(number, p) for p in ([parts[0]], [parts[1]], parts))
            if not all(_close(a + b, c) for a, b, c in zip(first, second, both, strict=True)):
                raise ConfigError(
                    f"The metric {bound.name!r} cannot be added up over ranks: its state is no sum over samples. "
                    "Keep sums and counts in its variables and form the value in result()."
                )

    def _state_after(self, number: int, batches: Sequence[tuple[Any, Any]]) -> list[tf.Tensor]:
        """Return a metric's state after `batches`, minus its initial state."""
        one = MetricSet([self.bound[number]], self._backend, self._names)
        metric = one.bound[0].metric
        metric.reset_state()
        empty = [tf.cast(unwrap(v), tf.float64) for v in metric.variables]
        for targets, outputs in batches:
            one.update(targets, outputs, None, 1.0)
        state = [tf.cast(unwrap(v), tf.float64) - zero for v, zero in zip(metric.variables, empty, strict=True)]
        metric.reset_state()
        return state


def _close(a: tf.Tensor, b: tf.Tensor) -> bool:
    return bool(tf.reduce_all(abs(a - b) <= 1e-3 * (abs(b) + 1e-6)))


def _halves(half: int) -> tuple[slice, slice]:
    return slice(0, half), slice(half, 2 * half)


def _copies(bound: Sequence[BoundMetric]) -> list[BoundMetric]:
    return [b._replace(metric=_copy(b.metric)) for b in bound]


def _copy(metric: Any) -> Any:
    try:
        return type(metric).from_config(metric.get_config())
    except (TypeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"The metric {metric.name!r} cannot be copied for evaluation: give {type(metric).__name__} a "
            f"get_config() with its constructor's arguments ({error})."
        ) from error
