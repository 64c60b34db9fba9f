"""Keras metrics over all replicas: their variables are summed, never their results."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.replicas import ForEachReplica
from hvdtrain.compat.keras import metric_with_function
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.context.positions import belonging
from hvdtrain.parallel.tensor.losses import on_shards, reads_shards
from hvdtrain.parallel.tensor.outputs import gathered, shard_of
from hvdtrain.state.variables import unwrap
from hvdtrain.training.objective.output_losses import OutputLoss
from hvdtrain.training.objective.outputs import outputs_by_name, per_output

Figure = float | np.ndarray
"""A metric's value."""


class BoundMetric(NamedTuple):
    """A metric with its output."""

    name: str
    """Name in reports."""
    metric: Any
    output: str
    """Name of the model's output."""
    weighted: bool
    """Whether it uses sample weights."""


class MetricSet:
    """Metrics updated on each replica and read over all; `names` returns the output names."""

    def __init__(self, bound: Sequence[BoundMetric], backend: Backend, names: Callable[[], Any] = lambda: None) -> None:
        originals = list(bound)
        # Each replica has its own variables; the first one uses the originals.
        self._sets = ForEachReplica(backend, lambda place: _copies(originals) if place else originals)
        self._backend = backend
        self._names = names
        self.sample: tuple[Any, Any] | None = None
        """Targets and outputs of one sample, used to build the metrics."""
        self._last: ForEachReplica[list[tf.Variable]] | None = None

    @property
    def bound(self) -> list[BoundMetric]:
        """The calling replica's metrics."""
        return self._sets.own

    def variables(self) -> list[tf.Variable]:
        """Return the calling replica's metric variables."""
        return [unwrap(variable) for bound in self.bound for variable in bound.metric.variables]

    def fresh(self) -> "MetricSet":
        """Return a reset copy, for evaluation during training. Raises ConfigError if not recreatable."""
        fresh = MetricSet(_copies(self.bound), self._backend, self._names)
        if self.sample is not None:
            fresh.build(*self.sample)
        return fresh

    def build(self, targets: Any, outputs: Any) -> None:
        """Create the metrics' variables, also of later copies: some shapes depend on a batch."""
        targets, outputs = tf.nest.map_structure(lambda tensor: tensor[:1], (targets, outputs))
        self.sample = targets, outputs
        for bound in self._sets.all:
            self._count(bound, targets, outputs, None)
        assert self._reported is not None, "the sums that were reported have variables as well"
        self.reset_all()

    def reset(self) -> None:
        """Reset the metrics of this replica."""
        for bound in self.bound:
            bound.metric.reset_state()

    def reset_all(self) -> None:
        """Reset the metrics of all replicas of this process."""
        for bound in itertools.chain(*self._sets.all):
            bound.metric.reset_state()
        for variable in itertools.chain(*self._last.all) if self._last is not None else ():
            variable.assign(tf.zeros_like(variable))

    def update(self, targets: Any, outputs: Any, sample_weight: Any, has_samples: tf.Tensor | float) -> None:
        """Update this replica's metrics, unless the batch is a placeholder."""
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
            _update(metric, label, output, weight)

    def _arguments(self, bound: Sequence[BoundMetric], targets: Any, outputs: Any, sample_weight: Any) -> list[Any]:
        """Return each metric with its targets, outputs and weights."""
        by_name = outputs_by_name(outputs, self._names())
        labels = per_output("The target", targets, list(by_name), shared=False)
        weights = per_output("sample_weight", sample_weight, list(by_name), shared=True)
        return [
            (metric, labels[output], by_name[output], weights[output] if weighted else None)
            for _, metric, output, weighted in bound
        ]

    def of_output(self, name: str, targets: Any, outputs: Any) -> tuple[Any, Any]:
        """Return targets and values of the output `name`."""
        by_name = outputs_by_name(outputs, self._names())
        return per_output("The target", targets, list(by_name), shared=False)[name], by_name[name]

    def sums_of(self, targets: Any, outputs: Any, sample_weight: Any) -> list[list[tf.Tensor]]:
        """Return each metric's state after this batch alone, without side effects."""
        shown = self._arguments(self.bound, targets, outputs, sample_weight)
        return [
            metric.stateless_update_state(
                [tf.zeros(v.shape, v.dtype) for v in metric.variables], label, output, sample_weight=weight
            )
            for metric, label, output, weight in shown
        ]

    def hold(self, sums: Sequence[Sequence[Any]] | None) -> None:
        """Set each metric's variables to sums of `sums_of`; None: to zero."""
        self.reset_all()
        for bound, values in zip(self.bound, sums or [], strict=sums is not None):
            for variable, value in zip(bound.metric.variables, values, strict=True):
                variable.assign(tf.cast(value, variable.dtype))

    def restore_sums(self, sums: Mapping[str, Sequence[Any]], *, counted_here: bool = True) -> None:
        """Restore global `sums` by metric name, or zero; one replica has `counted_here`."""
        self.reset_all()
        places = [(bound.name, place, v) for bound in self.bound for place, v in enumerate(bound.metric.variables)]
        for (name, place, variable), reported in zip(places, self._reported.own, strict=True):
            if place < len(sums.get(name, ())):
                value = tf.constant(sums[name][place], variable.dtype)
                reported.assign(value)
                if counted_here:
                    variable.assign(value)

    @property
    def _reported(self) -> "ForEachReplica[list[tf.Variable]]":
        """Global sums at the last `progress`, per replica."""
        if self._last is None:
            with tf.init_scope():
                self._last = ForEachReplica(self._backend, lambda place: _zeros_like(self._sets.all[place]))
        return self._last

    def sums_so_far(self, role: str) -> dict[str, list[tf.Tensor]]:
        """Return each metric's variables summed over the replicas, without side effects. Collective."""
        return {
            bound.name: [
                self._backend.all_reduce(unwrap(variable).read_value(), name=_name(role, number, place))
                for place, variable in enumerate(bound.metric.variables)
            ]
            for number, bound in enumerate(self.bound)
        }

    def reduce(self, role: str) -> None:
        """All-reduce every metric's variables in place, in a compiled function. Collective."""
        for number, bound in enumerate(self.bound):
            for place, variable in enumerate(bound.metric.variables):
                tensor = unwrap(variable)
                tensor.assign(self._backend.all_reduce(tensor.read_value(), name=_name(role, number, place)))

    def results(self) -> dict[str, Figure]:
        """Return each metric's value by name."""
        return {bound.name: metric_value(bound.metric.result()) for bound in self.bound}

    def reduced_results(self, role: str) -> dict[str, tf.Tensor]:
        """Return each metric's global value, in a compiled function. Collective."""
        self.reduce(role)
        return self._tensors()

    def progress(self, role: str) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Return metrics since the last call and since the reset. Collective.

        In one exchange, in a compiled function, without changing the counts.
        """
        reported = self._reported.own
        variables = self.variables()
        own = [variable.read_value() for variable in variables]
        self.reduce(role)
        sums, so_far = [variable.read_value() for variable in variables], self._tensors()
        for variable, total, before in zip(variables, sums, reported, strict=True):
            variable.assign(total - before.read_value())
        recent = self._tensors()
        for variable, value in zip([*variables, *reported], [*own, *sums], strict=True):
            variable.assign(value)
        return recent, so_far

    def _tensors(self) -> dict[str, tf.Tensor]:
        return {bound.name: tf.convert_to_tensor(bound.metric.result()) for bound in self.bound}

    def results_so_far(self, role: str, read: Callable[[], Mapping[str, Any]] | None = None) -> dict[str, tf.Tensor]:
        """Return global values without side effects, in a compiled function. Collective.

        `read` returns values by name; default: `results`.
        """
        variables = self.variables()
        own = [variable.read_value() for variable in variables]
        self.reduce(role)
        found = read() if read else {bound.name: bound.metric.result() for bound in self.bound}
        results = {name: tf.convert_to_tensor(value) for name, value in found.items()}
        for variable, value in zip(variables, own, strict=True):
            variable.assign(value)
        return results

    def check_sums(self, targets: Any, outputs: Any) -> None:
        """Reject a metric whose state is not additive: state(A, B) = state(A) + state(B) (ConfigError).

        With one sample there is nothing to compare.
        """
        half = int(tf.nest.flatten(outputs)[0].shape[0]) // 2
        if half == 0:
            return
        parts = [tf.nest.map_structure(lambda t, s=s: t[s], (targets, outputs)) for s in _halves(half)]
        for number, bound in enumerate(self.bound):
            if type(bound.metric).__module__.split(".")[0] == "keras":
                continue
            first, second, both = (self.state_after(number, p) for p in ([parts[0]], [parts[1]], parts))
            if not all(_close(a + b, c) for a, b, c in zip(first, second, both, strict=True)):
                raise ConfigError(
                    f"The metric {bound.name!r} cannot be summed over ranks: its state is not a sum over samples. "
                    "Keep sums and counts in its variables and form the value in result()."
                )

    def state_after(self, number: int, batches: Sequence[tuple[Any, Any]]) -> list[tf.Tensor]:
        """Return the state of metric `number` after `batches`, minus its initial state."""
        one = MetricSet([self.bound[number]], self._backend, self._names)
        metric = one.bound[0].metric
        metric.reset_state()
        empty = [tf.cast(unwrap(v), tf.float64) for v in metric.variables]
        for targets, outputs in batches:
            one.update(targets, outputs, None, 1.0)
        state = [tf.cast(unwrap(v), tf.float64) - zero for v, zero in zip(metric.variables, empty, strict=True)]
        metric.reset_state()
        return state


def _update(metric: Any, targets: Any, output: Any, sample_weight: Any) -> None:
    """Update a metric with sharded outputs if supported, else full ones."""
    if isinstance(metric, OutputLoss):
        metric.update_state(targets, output, sample_weight=sample_weight)
        return
    shard = shard_of(output)
    targets, sample_weight = belonging(output, targets, sample_weight)
    if shard is not None and reads_shards(metric):
        with on_shards(metric, shard):
            metric.update_state(targets, output, sample_weight=sample_weight)
    else:
        metric.update_state(targets, gathered(output), sample_weight=sample_weight)


def _zeros_like(bound: Sequence[BoundMetric]) -> list[tf.Variable]:
    variables = [unwrap(variable) for each in bound for variable in each.metric.variables]
    return [tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False) for variable in variables]


def _name(role: str, number: int, place: int) -> str:
    """Return a rank-independent name of a metric variable's sum; Keras may number metrics differently."""
    return f"{role}/{number}/{place}"


def metric_value(result: Any) -> Figure:
    """Convert a metric's result to a number, or several to an array."""
    value = np.asarray(result)
    return float(value) if value.ndim == 0 else value


def _close(a: tf.Tensor, b: tf.Tensor) -> bool:
    return bool(tf.reduce_all(abs(a - b) <= 1e-3 * (abs(b) + 1e-6)))


def _halves(half: int) -> tuple[slice, slice]:
    return slice(0, half), slice(half, 2 * half)


def _copies(bound: Sequence[BoundMetric]) -> list[BoundMetric]:
    return [b._replace(metric=copy_of(b.metric)) for b in bound]


def copy_of(metric: Any) -> Any:
    """Return a reset copy of `metric`. Raises ConfigError if it cannot be recreated from its configuration."""
    try:
        if type(metric) is keras.metrics.MeanMetricWrapper:
            # A user's function, which Keras finds by its name only if it was registered.
            return metric_with_function(metric)
        return type(metric).from_config(metric.get_config())
    except (TypeError, NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"The metric {metric.name!r} cannot be copied for evaluation: give {type(metric).__name__} a "
            f"get_config() with its constructor's arguments ({error})."
        ) from error
