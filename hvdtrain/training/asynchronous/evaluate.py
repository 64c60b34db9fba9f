"""Evaluation and prediction on workers, one batch each."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Future, Workers
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks, evaluation_of
from hvdtrain.training.evaluation.predict import predicted
from hvdtrain.training.step.batches import inputs_for
from hvdtrain.training.step.logs import StepLogs, Value, metric_value
from hvdtrain.training.step.loss_terms import MEANS, Kinds


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
        self._logs.restore_sums(sums, counted_here=True)
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


class AsynchronousEvaluator:
    """Calls the model's `test_step` for each batch on a worker, and adds up the metrics' states."""

    def __init__(self, backend: Backend, workers: Workers, model: Any) -> None:
        self._backend = backend
        self._workers = workers
        self._model = model
        self._logs = StepLogs(backend, model, "test_step")
        self.kinds = MEANS
        self.find_kinds: Callable[[Batch], Kinds] | None = None
        self._evaluate = tf.function(
            lambda *parts: backend.run(self._states, *parts), autograph=False, reduce_retracing=True
        )

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, calling `hooks`. Raises DataError for no samples."""
        begin = time.perf_counter()
        hooks, tally = hooks or EvaluationHooks(), Tally(self._logs)
        number = -1
        for number, batch in enumerate(batches):
            hooks.begin_test_step(number)
            parts = batch[:2] if batch.sample_weight is None else batch[:3]
            tally.add(self._workers.schedule(self._evaluate, *parts))
            hooks.end_test_step(number, tally.results)
        if number < 0:
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        results = tally.results()
        self._logs.reset()
        return evaluation_of(results, time.perf_counter() - begin)

    def _states(self, *data: Any) -> dict[str, Any]:
        """Return the state of each metric after one batch alone."""
        variables = self._logs.keras_variables()
        empty = [(v, tf.zeros(v.shape, v.dtype)) for v in variables]
        # Within such a context Keras asks it for the variables that have a regularizer.
        regularized = [(v, tf.convert_to_tensor(v.value)) for v in self._model.trainable_variables if v.regularizer]
        with keras.StatelessScope([*empty, *regularized], collect_losses=True) as scope:
            with self._logs.recording():
                returned = self._model.test_step(data)
            self._logs.take(returned, tf.cast(tf.shape(tf.nest.flatten(data)[0])[0], tf.float64))
        return {"metrics": [tf.convert_to_tensor(scope.get_current_value(v)) for v in variables]}


class AsynchronousPredictor:
    """Predicts each batch on a worker."""

    def __init__(self, backend: Backend, workers: Workers, model: Any) -> None:
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
