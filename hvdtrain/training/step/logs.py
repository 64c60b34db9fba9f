"""Results of a model's steps over all replicas."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives, world_size
from hvdtrain.compat.keras import compile_metrics, compiled_metrics, flatten_layers, own_metrics
from hvdtrain.compat.seams import METRIC_RESULT
from hvdtrain.compat.tensorflow import compiled, eager_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.compiled import run_once
from hvdtrain.state.variables import unwrap
from hvdtrain.training.step.own_metrics import is_own_metric, only_added_to
from hvdtrain.training.step.placeholder import restored_if_empty

Value = float | np.ndarray
"""A metric's value."""


class Figure(NamedTuple):
    """Source of a value returned by a step."""

    metric: Any
    """The metric with this result; None for other tensors."""
    key: tuple[str, ...]
    """Where the value lies in a result that is a dict, perhaps of dicts."""
    sums: tf.Variable | None
    """[values + 1], for other tensors: this replica's sums of value x samples, and of samples."""
    shape: tf.TensorShape = tf.TensorShape([])
    """That of other tensors, of which the first dim may be unknown."""
    variable: tf.Variable | None = None
    """A returned variable, such as a learning rate, which is read when it is shown, as after the step."""

    def read(self) -> tf.Tensor:
        """Return the metric's current result."""
        result = self.metric.result()
        for name in self.key:
            result = result[name]
        return tf.convert_to_tensor(result)

    def read_sums(self) -> tf.Tensor:
        """Return `sums` now."""
        assert self.sums is not None, "not of a metric"
        if self.variable is None:
            return self.sums.read_value()
        samples = self.sums[-1]
        sums = tf.math.multiply_no_nan(tf.cast(self.variable, tf.float64), samples)
        return tf.concat([tf.reshape(sums, [-1]), [samples]], 0)

    def mean(self, sums: tf.Tensor) -> tf.Tensor:
        """Return the value of which these are `sums` over the replicas."""
        value = tf.math.divide_no_nan(sums[:-1], sums[-1])
        return tf.reshape(value, [-1, *self.shape[1:]] if self.shape.rank else [])


class Results(NamedTuple):
    """Global results by name: tensors, or their values."""

    of_step: dict[str, Any]
    """Of what the step returned."""
    of_epoch: dict[str, Any]
    """Of the model's metrics where the step returned their names, as Keras reports epochs; else as `of_step`."""


class StepLogs:
    """Global values of a step's results: metric results over all samples, other tensors of the last batch, as in Keras.

    A metric's result is computed from its variables summed over the replicas, since most are sums. Anything else is
    averaged over the replicas, weighted by samples.

    Args:
        replicas: sums the variables.
        step: `train_step` or `test_step`, for messages.
    """

    def __init__(self, replicas: Backend, model: Any, step: str) -> None:
        self._replicas = replicas
        self._model = model
        self._step = step
        self._figures: dict[str, Figure] = {}
        """Of what a step returned, by name."""
        self._of_epoch: dict[str, Figure] = {}
        """Of an epoch: where these are the names of the model's metrics, their results, as in Keras."""
        self._other: dict[str, tf.Variable] = {}
        self._seen: dict[int, dict[int, tuple[Any, tuple[str, ...], Any]]] = {}
        """Results of metrics by their identity, of each thread that traces: a strategy has one for each replica."""
        self._reported: dict[int, tf.Variable] = {}
        """Global sums at the last `progress`, by the identity of the metric's variable."""

    @property
    def names(self) -> list[str]:
        """Names of the results, once traced."""
        return list(self._figures)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record which tensors are metric results, while a step is traced."""
        seen = self._seen[threading.get_ident()] = {}
        with ExitStack() as stack:
            for metric in metrics_of(self._model):
                stack.enter_context(METRIC_RESULT.replaced(metric, _noting(metric, seen)))
            yield

    @contextmanager
    def counting(self, has_samples: tf.Tensor | float) -> Iterator[None]:
        """Count the metrics of a pass over this replica's own samples, unless these are a placeholder.

        Raises ConfigError for a metric of one's own whose variables cannot be added up over the replicas.
        """
        every = [*metrics_of(self._model), *compiled_metrics(self._model)] if self._replicas.size > 1 else []
        own = [each for each in every if is_own_metric(each)]
        with only_added_to(own), restored_if_empty(self.variables(), has_samples):
            yield

    def take(
        self, logs: Any, samples: tf.Tensor, *, whole: tf.Tensor | None = None, first: bool = True
    ) -> list[tf.Tensor]:
        """Record the results of `samples` samples; return tensors to check.

        Args:
            logs: what the step returned.
            samples: number of this replica's samples, float64.
            whole: number of all replicas' samples, of whose values this replica has parts that add up; None: values are
                means over its samples.
            first: whether they are of the first microbatch of a step.

        Returns:
            The loss; without one, all results named as losses, or else everything.

        Raises:
            ConfigError: not a dict of numbers, or several of them for one name where each replica, or microbatch, has
                other samples.
        """
        values = {name: self._figure(name, value) for name, value in self._flat(logs).items()}
        self._figures = {name: figure for name, (_, figure) in values.items()}
        self._of_epoch = self._figures_of_epoch(logs)
        for name, (value, figure) in values.items():
            if figure.sums is not None:
                weight = tf.cast(samples, tf.float64)
                factor = weight if whole is None else whole
                if value.shape.rank and not (first and (whole is not None or not self._counted_apart())):
                    raise self._no_number(name, value)
                mine = tf.reshape(tf.math.multiply_no_nan(tf.cast(value, tf.float64), factor), [-1])
                self._count(figure.sums, tf.concat([mine, [weight]], 0), first=first)
        self._seen.pop(threading.get_ident(), None)
        losses = [name for name in values if "loss" in name]
        watched = ["loss"] if "loss" in values else losses or list(values)
        checked = [values[name][0] for name in watched]
        return [tf.reduce_mean(value) if value.shape.rank else value for value in checked]

    def _figures_of_epoch(self, logs: Mapping[str, Any]) -> dict[str, Figure]:
        """Return the results of the model's metrics if the step returned their names; else those of the step."""
        container = compile_metrics(self._model)
        if container is not None and not container.built:
            return self._figures
        with self.recording():
            named = self._model.get_metrics_result()
        if set(named) != set(logs):
            return self._figures
        found = {name: self._figure(name, value)[1] for name, value in self._flat(named).items()}
        return {name: figure if figure.metric else self._figures[name] for name, figure in found.items()}

    def own_values(self, logs: Any) -> dict[str, Any]:
        """Return those of a step's results that are no metric's and no variables, while they are recorded."""
        seen = self._seen.get(threading.get_ident(), {})
        flat = self._flat(logs).items()
        return {name: value for name, value in flat if id(value) not in seen and not _is_variable(value)}

    def results(self, role: str, *, keep: bool = False) -> Results:
        """Return the global results. Collective. The metrics' variables are unchanged, or `keep` the global sums."""
        with self._summed(role, keep=keep) as others:
            return self._read(others)

    def progress(self, role: str) -> tuple[dict[str, tf.Tensor], Results]:
        """Return the results since the last call, and since the reset. Collective.

        In one exchange, in a compiled function, without changing what is counted.
        """
        with self._summed(role) as others:
            so_far = self._read(others)
            sums = [variable.read_value() for variable in self.variables()]
            reported = [self._reported_sum(variable) for variable in self.variables()]
            for variable, total, before in zip(self.variables(), sums, reported, strict=True):
                variable.assign(total - before.read_value())
            recent = self._read(others).of_epoch
        for before, total in zip(reported, sums, strict=True):
            before.assign(total)
        return recent, so_far

    def sums(self, role: str) -> dict[str, list[tf.Tensor]]:
        """Return every metric's variables by name, summed over the replicas. Collective."""
        with self._summed(role):
            return {
                name: [unwrap(variable).read_value() for variable in metric.variables]
                for name, metric in self._named().items()
            }

    def restore_sums(self, sums: Mapping[str, Sequence[Any]], *, counted_here: Callable[[], bool]) -> None:
        """Restore the metrics' variables from `sums`, or reset them; replicas that have `counted_here` hold them."""
        self.reset()
        restored = [
            (variable, tf.constant(value, variable.dtype))
            for name, metric in self._named().items()
            for variable, value in zip(metric.variables, sums.get(name, ()), strict=False)
        ]
        for variable, value in restored:
            self._reported_sum(unwrap(variable)).assign(value)

        def restore() -> None:
            for variable, value in restored if counted_here() else ():
                variable.assign(value)

        if restored:  # by the replicas themselves: outside of them a strategy divides sums among all of its processes
            run_once(lambda: where_counted(self._replicas, restore))

    def reset(self) -> None:
        """Reset the model's metrics, like Keras per epoch, and other averages."""
        self.reset_model()
        for variable in (*self._other.values(), *self._reported.values()):
            variable.assign(tf.zeros_like(variable))

    def reset_model(self) -> None:
        """Reset the metrics that Keras resets."""
        self._model.reset_metrics()

    def clear(self) -> None:
        """Reset every metric, also of layers that Keras does not reset, whose sums another replica has."""
        for metric in metrics_of(self._model):
            metric.reset_state()

    def variables(self) -> list[tf.Variable]:
        """Return the metrics' variables."""
        found = {id(unwrap(v)): unwrap(v) for metric in metrics_of(self._model) for v in metric.variables}
        return list(found.values())

    def keras_variables(self) -> list[Any]:
        """Return the metrics' variables as Keras'."""
        found = {id(unwrap(v)): v for metric in metrics_of(self._model) for v in metric.variables}
        return list(found.values())

    def states(self) -> dict[str, list[np.ndarray]]:
        """Return every metric's variables by name, on this replica."""
        return {name: [np.asarray(v) for v in metric.variables] for name, metric in self._named().items()}

    def local_results(self) -> dict[str, tf.Tensor]:
        """Return the results of metrics by name, on this replica."""
        return {name: figure.read() for name, figure in self._of_epoch.items() if figure.metric is not None}

    def _count(self, sums: tf.Variable, mine: tf.Tensor, *, first: bool) -> None:
        """Add to the sums of a result that is no metric's; the `first` begins them."""
        (sums.assign if first else sums.assign_add)(mine)

    def _counted_apart(self) -> bool:
        """Return whether each replica has sums of its own; each stage of a replica has, too."""
        return world_size(self._replicas) > 1

    @contextmanager
    def _summed(self, role: str, *, keep: bool = False) -> Iterator[dict[str, tf.Tensor]]:
        """Let the metrics' variables hold sums over the replicas; yield the averages of other results. Collective.

        To `keep` them is to hold them afterwards, too.
        """
        variables = self.variables()
        own = [variable.read_value() for variable in variables]
        others = {name: figure.read_sums() for name, figure in self._figures.items() if figure.sums is not None}
        summed = [*own, *others.values()]
        if self._counted_apart():
            summed = all_reduced(self._replicas, summed, role)
            for variable, value in zip(variables, summed, strict=False):
                variable.assign(value)
        pairs = zip(others, summed[len(own) :], strict=True)
        yield {name: self._figures[name].mean(sums) for name, sums in pairs}
        for variable, value in zip(variables, own, strict=True):
            if not keep:
                variable.assign(value)

    def _read(self, others: Mapping[str, tf.Tensor]) -> Results:
        def values(figures: Mapping[str, Figure]) -> dict[str, tf.Tensor]:
            return {name: others[name] if figure.metric is None else figure.read() for name, figure in figures.items()}

        of_step = values(self._figures)
        return Results(of_step, of_step if self._of_epoch is self._figures else values(self._of_epoch))

    def note_reported(self) -> None:
        """Make the variables of `progress`, for which a strategy must be entered."""
        for variable in self.variables():
            self._reported_sum(variable)

    def _reported_sum(self, variable: tf.Variable) -> tf.Variable:
        if id(variable) not in self._reported:
            with eager_variables():
                zeros = tf.zeros(variable.shape, variable.dtype)
                # The same on all replicas of a strategy.
                once = tf.VariableAggregation.ONLY_FIRST_REPLICA
                self._reported[id(variable)] = tf.Variable(zeros, trainable=False, name="reported", aggregation=once)
        return self._reported[id(variable)]

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
        seen = self._seen.get(threading.get_ident(), {})
        if id(value) in seen:
            metric, key, _ = seen[id(value)]
            return tf.convert_to_tensor(value), Figure(metric, key, None)
        try:
            given = tf.convert_to_tensor(value)
            if given.dtype == tf.string:
                raise TypeError("text is not a number")
            tensor = tf.cast(given, tf.float64)
            if tensor.shape.rank is None or tensor.shape.num_elements() == 1:
                tensor = tf.reshape(tensor, [])
        except (TypeError, ValueError) as error:
            raise self._no_number(name, value) from error
        if name not in self._other:
            with eager_variables():
                zeros = tf.zeros([1 + (tensor.shape[1:].num_elements() or 1)], tf.float64)
                shape = [None] if tensor.shape.rank else [2]
                self._other[name] = tf.Variable(zeros, trainable=False, name="figure", shape=shape)
        variable = unwrap(value) if _is_variable(value) else None
        return tensor, Figure(None, (), sums=self._other[name], shape=tensor.shape, variable=variable)

    def _no_number(self, name: str, value: Any) -> ConfigError:
        return ConfigError(
            f"{self._step} of {type(self._model).__name__} must return one number for each name, such as "
            f"tf.reduce_mean(loss). Received for {name!r}: {value!r}."
        )

    def _named(self) -> dict[str, Any]:
        """Return the metrics that have variables, by distinct names."""
        named: dict[str, Any] = {}
        container = compile_metrics(self._model)
        for each in metrics_of(self._model):
            for metric in compiled_metrics(self._model) if each is container else [each]:
                if not metric.variables:
                    continue
                name, count = metric.name, 1
                while (key := name if count == 1 else f"{name}#{count}") in named:
                    count += 1
                named[key] = metric
        return named


class EpochMetrics:
    """The results of a compiled step over an epoch and all replicas; base of steps.

    Args:
        logs: the results of the model's `train_step`.
        counts: whether this process sees the outputs; exactly one process of a replica does.
    """

    def __init__(self, backend: Backend, logs: StepLogs, *, counts: bool = True) -> None:
        self._backend = backend
        self._logs = logs
        self._counts = counts
        # Outside of its replicas a strategy assigns to variables of all processes, which only some of them would do.
        self._shares = backend.job_size > 1 and not backend.capabilities.needs_builders
        """Whether other processes count, too, each by metrics of its own."""
        self._drop: Callable[[], None] | None = None
        """While the model's metrics hold the sums over all replicas: what resets them again where others count them."""
        self._so_far: Results | None = None
        """Results of the epoch so far, if they are known since the last step."""
        self._results = self._compiled(lambda: logs.results("metric_so_far"))
        self._showing = self._compiled(lambda: logs.results("metrics_shown", keep=True))
        self._recent = self._compiled(self._progress)
        self._sums = self._compiled(lambda: logs.sums("metric_sums"))

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Reset the metrics, or restore `sums`, as `show_metrics` shows them."""
        self._so_far, self._drop = None, self._logs.reset_model if self._shares else None
        self._logs.restore_sums(sums or {}, counted_here=lambda: self._shares or self._counts_for_all())

    def show_metrics(self) -> None:
        """Let the model's metrics hold the sums over all replicas, for user code before the next step. Collective.

        What that code leaves there counts once.
        """
        if self._shares and self._drop is None:
            self._so_far = _values(self._showing())
            self._drop = self._logs.clear

    def _count(self) -> None:
        """Go on to count; the first replica has what the metrics held while they were shown."""
        self._so_far = None
        if self._drop is not None and not self._counts_for_all():
            self._drop()
        self._drop = None

    def _counts_for_all(self) -> bool:
        return self._counts and self._backend.index == 0

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return the state of each metric over all replicas. Collective."""
        self._count()
        return {name: [value.numpy().tolist() for value in values] for name, values in self._sums().items()}

    def recent_metrics(self) -> dict[str, Value]:
        """Return the results since the last call in the epoch, over all replicas. Collective."""
        self._count()
        with self._backend.scope():
            self._logs.note_reported()
        recent, so_far = self._recent()
        self._so_far = _values(so_far)
        return _numbers(recent)

    def results_of_step(self) -> dict[str, Value]:
        """Return what the last step returned, over all replicas: metrics of the epoch so far. Collective."""
        return dict(self._known().of_step)

    def metrics_so_far(self) -> dict[str, Value]:
        """Return the results of the epoch so far, over all replicas. Collective."""
        return dict(self._known().of_epoch)

    def epoch_metrics(self) -> dict[str, Value]:
        """Return the results of the epoch, over all replicas, which the metrics hold until the next. Collective."""
        results = self.metrics_so_far()
        self.show_metrics()
        return results

    def _known(self) -> Results:
        if self._so_far is None:
            self._count()
            self._so_far = _values(self._results())
        return self._so_far

    def _progress(self) -> tuple[dict[str, tf.Tensor], Results]:
        """Return the results since the last call, and of the epoch so far, in a compiled function. Collective."""
        return self._logs.progress("train_metric")

    def _compiled(self, function: Callable[[], Any]) -> Callable[[], Any]:
        results: Callable[[], Any] = compiled(lambda: where_counted(self._backend, function))
        return results


def where_counted(backend: Backend, function: Callable[[], Any]) -> Any:
    """Call `function` on each replica, or once where they share what is counted; return the first one's results."""
    return function() if backend.capabilities.shares_variables else backend.run(function)


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign")


def _noting(metric: Any, seen: dict[int, tuple[Any, tuple[str, ...], Any]]) -> Callable[..., Any]:
    """Return a metric's `result` that notes its values in `seen`."""

    def result(*args: Any, **kwargs: Any) -> Any:
        value = type(metric).result(metric, *args, **kwargs)
        seen.update({id(each): (metric, key, each) for key, each in _values_in(value)})
        return value

    return result


def _values_in(result: Any, key: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of a metric's result, which may be a dict: of compiled metrics one of dicts."""
    if isinstance(result, dict):
        for name, each in result.items():
            yield from _values_in(each, (*key, name))
    else:
        yield key, result


def metrics_of(model: Any) -> list[Any]:
    """Return a model's metrics: those it resets, then others of it or its layers."""
    layers = flatten_layers(model)
    found = [*model.metrics, *(metric for layer in layers for metric in own_metrics(layer))]
    return list({id(metric): metric for metric in found}.values())


def all_reduced(replicas: Collectives, tensors: Sequence[tf.Tensor], role: str) -> list[tf.Tensor]:
    """Return the sums of `tensors` over the replicas, in one message for each dtype. Collective."""
    sums: dict[int, tf.Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        places = [place for place, tensor in enumerate(tensors) if tensor.dtype == dtype]
        flat = tf.concat([tf.reshape(tensors[place], [-1]) for place in places], 0)
        total = replicas.all_reduce(flat, name=f"{role}/{dtype.name}")
        known = {place: tensors[place].shape.is_fully_defined() for place in places}
        sizes = [tensors[place].shape.num_elements() if known[place] else tf.size(tensors[place]) for place in places]
        for place, part in zip(places, tf.split(total, sizes, num=len(sizes)), strict=True):
            sums[place] = tf.reshape(part, tensors[place].shape if known[place] else tf.shape(tensors[place]))
    return [sums[place] for place in range(len(tensors))]


def _values(results: Results) -> Results:
    """Convert results to numbers and arrays."""
    return Results(*map(_numbers, results))


def _numbers(results: Mapping[str, Any]) -> dict[str, Value]:
    return {name: metric_value(result) for name, result in results.items()}


def metric_value(result: Any) -> Value:
    """Convert a metric's result to a number, or several to an array."""
    value = np.asarray(result)
    return float(value) if value.ndim == 0 else value
