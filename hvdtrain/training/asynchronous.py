"""Training, evaluation and prediction on asynchronous workers, for the parameter-server backend."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.parameter_server import ParameterServerBackend
from hvdtrain.backends.protocol import Backend, Future, Workers
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch, as_batch
from hvdtrain.data.streams.given import batched
from hvdtrain.state.optimizers import rate_of
from hvdtrain.state.structure import seed_states
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.compile_settings import Objective
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks, KerasEvaluator, evaluation_of
from hvdtrain.training.evaluation.predict import Predictor, predicted
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.batches import inputs_for, parts_of
from hvdtrain.training.step.contract import CompiledStep, Measured, StepResult
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.forward_backward import ForwardBackward
from hvdtrain.training.step.logs import StepLogs, Value, metric_value
from hvdtrain.training.step.pinned import PinnedScope, pinned
from hvdtrain.training.step.step_factory import KerasStepFactory
from hvdtrain.training.update_rules.base import UpdateRule


class AsynchronousStepFactory(KerasStepFactory):
    """hvdtrain's step and evaluation, dispatched to workers."""

    def __init__(
        self, backend: ParameterServerBackend, model: Any, optimizer: Any, objective: Objective, options: StepOptions
    ) -> None:
        self._workers = backend.workers
        super().__init__(backend, model, optimizer, objective, options)

    def _new_evaluator(self) -> KerasEvaluator:
        return AsynchronousEvaluator(self._backend, self._workers, self._model)

    def _new_step(self, state: TrainState, rule: UpdateRule, microbatch: int | None) -> CompiledStep:
        passes = ForwardBackward(self._backend, state, self._logs, whole=True)
        return AsynchronousStep(
            backend=self._backend, workers=self._workers, state=state, passes=passes, logs=self._logs, rule=rule
        )

    def predictor(self) -> Predictor:
        """Return a predictor on workers."""
        return AsynchronousPredictor(self._backend, self._workers, self._model)


class AsynchronousStep(CompiledStep):
    """Dispatches each batch to a worker, which updates the parameters immediately.

    A step's gradient is that of its whole batch. When it is applied, other workers have updated the parameters since
    they were read: with n workers by up to n - 1 steps, or more if they are faster. Learning rate, optimizer
    corrections and dropout are functions of the step's number. A measured step waits for all steps before it, and for
    itself.

    Args:
        workers: take the steps.
        logs: the results of the model's `train_step`.
    """

    def __init__(
        self,
        backend: Backend,
        workers: Workers,
        state: TrainState,
        passes: ForwardBackward,
        logs: StepLogs,
        rule: UpdateRule,
    ) -> None:
        self._backend = backend
        self._workers = workers
        self._state = state
        self._forward_backward = passes
        self._logs = logs
        self._rule = rule
        self._ahead = 0
        """Steps since the last one waited for."""
        self._epoch = Tally(logs)
        self._recent = Tally(logs)
        """Metrics since the last logged step."""
        self._functions: dict[tuple[bool, bool | None], Callable[..., Any]] = {}

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Dispatch `batch` to a worker; `measure` waits and returns `Measured`."""
        if measure:
            self._workers.join()
        later = self._workers.schedule(
            self._function(measure, batch.finite), parts_of(batch), tf.constant(self._ahead, tf.int64)
        )
        self._ahead += 1
        self._epoch.add(later)
        self._recent.add(later)
        return StepResult(_TotalsOf(later), self._measured(later.fetch()) if measure else None)

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Reset the epoch's metrics, or restore `sums`."""
        self._epoch.reset()
        self._epoch.restore_sums(sums or {})
        self._recent.reset()

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return the state of each metric of the epoch."""
        return self._epoch.sums()

    def recent_metrics(self) -> dict[str, Value]:
        """Return the results since the last call."""
        results = self._recent.results()
        self._recent.reset()
        return results

    def show_metrics(self) -> None:
        """Let the model's metrics hold those of the epoch so far."""
        self._epoch.results()

    def results_of_step(self) -> dict[str, Value]:
        """Return the results of the epoch so far."""
        return self._epoch.results()

    def metrics_so_far(self) -> dict[str, Value]:
        """Return the results of the epoch so far."""
        return self._epoch.results()

    def epoch_metrics(self) -> dict[str, Value]:
        """Return the metrics of the epoch, which the model's hold."""
        return self.metrics_so_far()

    def _function(self, measure: bool, finite: bool | None) -> Callable[..., Any]:
        def run(parts: tuple[Any, ...], ahead: tf.Tensor) -> Any:
            samples = tf.shape(tf.nest.flatten(parts)[0])[0]
            return self._backend.run(self._step, as_batch(parts, 1.0, samples, finite=finite), ahead, measure)

        key = (measure, finite)
        if key not in self._functions:
            self._functions[key] = tf.function(run, autograph=False, reduce_retracing=True)
        return self._functions[key]

    def _step(self, batch: Batch, ahead: tf.Tensor, measure: bool) -> dict[str, Any]:
        """Take the step on a worker and return its results."""
        optimizer = self._state.optimizer
        states: list[tf.Tensor] = []
        local = self._forward_backward(batch, within=lambda: self._drawing(ahead, states))
        with self._counting(ahead):
            rate = rate_of(optimizer)
            totals, norm = self._rule.update(local, measure=measure)
        found = {"totals": totals, "metrics": states}
        if measure:
            found["rate"], found["norm"] = rate, norm
            found["finite"] = zero_if_finite([v.read_value() for v in self._state.trainable.values()])
        return found

    @contextmanager
    def _drawing(self, ahead: tf.Tensor, states: list[tf.Tensor]) -> Iterator[None]:
        """Make random layers functions of (seed, step), and count the metrics of this step alone, in `states`."""
        model = self._state.model
        seeds = seed_states(model)
        drawn = {id(seed) for seed in seeds}
        generators = self._state.generator_states(0, self._state.counter + ahead).values() if seeds else ()
        counted = self._logs.keras_variables()
        empty = [(v, tf.zeros(v.shape, v.dtype)) for v in counted]
        others = [v for v in model.non_trainable_variables if id(v) not in drawn]
        with pinned([*zip(seeds, generators, strict=True), *empty], others, reads=True) as scope:
            yield
        states[:] = [tf.convert_to_tensor(scope.get_current_value(v)) for v in counted]

    def _counting(self, ahead: tf.Tensor) -> AbstractContextManager[None]:
        """Return a context with the optimizer's `iterations` before this step."""
        optimizer = self._state.optimizer
        count = optimizer.iterations
        at = tf.convert_to_tensor(count) + tf.cast(ahead, count.dtype)
        others = [v for v in [*self._state.model.trainable_variables, *optimizer.variables] if v is not count]
        return pinned([(count, at)], [v for v in others if isinstance(v, keras.Variable)])

    def _measured(self, found: dict[str, Any]) -> Measured:
        """Advance the counters to the completed steps, and return the measurements."""
        self._state.counter.assign_add(self._ahead)
        self._state.optimizer.iterations.assign_add(self._ahead)
        self._ahead = 0
        return Measured(
            learning_rate=found["rate"],
            grad_norm=found["norm"],
            loss_scale=None,
            finite=np.isfinite(found["finite"]),
        )


class _TotalsOf:
    """Totals of a pending step."""

    def __init__(self, later: Future) -> None:
        self._later = later

    def numpy(self) -> Any:
        return self._later.fetch()["totals"]


class Tally:
    """Metric states accumulated in float64 over batches of several workers."""

    def __init__(self, logs: StepLogs) -> None:
        self._logs = logs
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        self._sums: list[np.ndarray] | None = None
        self._pending: list[Future] = []

    def add(self, later: Future) -> None:
        """Count the `metrics` of a pending call."""
        self._pending.append(later)

    def restore_sums(self, sums: Mapping[str, Sequence[Any]]) -> None:
        """Restore the result of `sums`."""
        self._logs.restore_sums(sums, counted_here=lambda: True)
        self._sums = [np.asarray(variable).astype(np.float64) for variable in self._logs.variables()]

    def sums(self) -> dict[str, list[Any]]:
        """Wait for pending calls and return each metric's variables by name."""
        with self._held():
            return {name: [v.tolist() for v in values] for name, values in self._logs.states().items()}

    def results(self) -> dict[str, Value]:
        """Wait for pending calls and return each result."""
        with self._held():
            return {name: metric_value(value) for name, value in self._logs.local_results().items()}

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Let the metrics' variables hold what was counted."""
        variables = self._logs.variables()
        for later in self._pending:
            states = [np.asarray(value, np.float64) for value in later.fetch()["metrics"]]
            self._sums = states if self._sums is None else [a + b for a, b in zip(self._sums, states, strict=True)]
        self._pending.clear()
        for place, variable in enumerate(variables):
            value = tf.zeros_like(variable) if self._sums is None else self._sums[place]
            variable.assign(tf.cast(value, variable.dtype))
        yield


class AsynchronousEvaluator(KerasEvaluator):
    """Calls the model's `test_step` for each batch on a worker, and adds up the metrics' states."""

    def __init__(self, backend: Backend, workers: Workers, model: Any) -> None:
        super().__init__(backend, model)
        self._workers = workers
        self._evaluate = tf.function(
            lambda *parts: backend.run(self._states, *parts), autograph=False, reduce_retracing=True
        )

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, calling `hooks`. Raises DataError for no samples."""
        begin = time.perf_counter()
        hooks, tally = hooks or EvaluationHooks(), Tally(self._logs)
        count, at_once = 0, self._model.steps_per_execution
        for together in batched(batches, at_once):
            hooks.begin_test_step(count)
            for batch in together:
                tally.add(self._workers.schedule(self._evaluate, *parts_of(batch)))
            hooks.end_test_step(count + at_once - 1, tally.results)
            count += len(together)
        if not count:
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        results = tally.results()
        self._logs.reset()
        return evaluation_of(results, time.perf_counter() - begin)

    def _states(self, *data: Any) -> dict[str, Any]:
        """Return the state of each metric after one batch alone."""
        variables = self._logs.keras_variables()
        empty = [(v, tf.zeros(v.shape, v.dtype)) for v in variables]
        with PinnedScope(empty, reads=True) as scope:
            with self._logs.recording():
                returned = self._model.test_step(data)
            self._logs.take(returned, tf.cast(tf.shape(tf.nest.flatten(data)[0])[0], tf.float64))
        return {"metrics": [tf.convert_to_tensor(scope.get_current_value(v)) for v in variables]}


class AsynchronousPredictor(Predictor):
    """Predicts each batch on a worker."""

    def __init__(self, backend: Backend, workers: Workers, model: Any) -> None:
        super().__init__(backend, model)
        self._workers = workers
        self._outputs = tf.function(
            lambda inputs: backend.run(lambda own: model(inputs_for(model, own), training=False), inputs),
            autograph=False,
            reduce_retracing=True,
        )

    def __call__(self, batches: Iterable[Batch], callbacks: Any = None) -> Any:
        """Return the outputs [samples, …] in the model's structure and input order. Raises DataError if empty."""
        outcomes = [self._workers.schedule(self._outputs, batch.inputs) for batch in batches]
        return predicted(outcomes, lambda one: one.fetch(), callbacks)
