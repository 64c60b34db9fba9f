"""Evaluation and prediction on workers, one batch each."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Future, Workers
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch
from hvdtrain.training.evaluation.evaluate import Evaluation, EvaluationHooks
from hvdtrain.training.objective.losses import LossFunction, with_model_losses
from hvdtrain.training.objective.metrics import Figure, MetricSet
from hvdtrain.training.objective.outputs import inputs_for

States = Sequence[Sequence[Any]]
"""State of each metric's variables after one batch."""


class Tally:
    """Metrics accumulated in float64 over batches of several workers."""

    def __init__(self, metrics: MetricSet) -> None:
        self._metrics = metrics
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        self._sums: list[list[np.ndarray]] | None = None
        self._pending: list[Future] = []

    def add(self, later: Future) -> None:
        """Count the `metrics` of a pending call."""
        self._pending.append(later)

    def count(self, states: States) -> None:
        """Count the metric state of one batch."""
        wide = [[np.asarray(value, np.float64) for value in state] for state in states]
        if self._sums is not None:
            wide = [
                [a + b for a, b in zip(one, other, strict=True)] for one, other in zip(self._sums, wide, strict=True)
            ]
        self._sums = wide

    def restore_sums(self, sums: Mapping[str, Sequence[Any]]) -> None:
        """Restore the result of `sums`."""
        self._metrics.restore_sums(sums)
        self._sums = [[v.numpy().astype(np.float64) for v in bound.metric.variables] for bound in self._metrics.bound]

    def sums(self) -> dict[str, list[Any]]:
        """Wait for pending calls and return each metric's variables by name."""
        self.results()
        bound = self._metrics.bound
        return {each.name: [variable.numpy().tolist() for variable in each.metric.variables] for each in bound}

    def results(self) -> dict[str, Figure]:
        """Wait for pending calls and return each metric's value."""
        for later in self._pending:
            self.count(later.fetch()["metrics"])
        self._pending.clear()
        self._metrics.hold(self._sums)
        return self._metrics.results()


class AsynchronousEvaluator:
    """Evaluates each batch on a worker, in fresh metrics."""

    def __init__(self, backend: Backend, workers: Workers, model: Any, loss: LossFunction, metrics: MetricSet) -> None:
        self._backend = backend
        self._workers = workers
        self._model = model
        self._loss = loss
        self._metrics = metrics
        self._evaluate = tf.function(
            lambda *parts: backend.run(self._sums, *parts), autograph=False, reduce_retracing=True
        )

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, calling `hooks`. Raises DataError for no samples."""
        begin = time.perf_counter()
        hooks, tally = hooks or EvaluationHooks(), Tally(self._metrics)
        outcomes: list[Future] = []

        def so_far() -> dict[str, Figure]:
            return {"loss": _mean(outcomes), **tally.results()}

        for number, batch in enumerate(batches):
            hooks.begin_test_step(number)
            parts = batch[:2] if batch.sample_weight is None else batch[:3]
            outcomes.append(self._workers.schedule(self._evaluate, *parts))
            tally.add(outcomes[-1])
            hooks.end_test_step(number, so_far)
        if not _weight(outcomes):
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        return Evaluation(_mean(outcomes), tally.results(), time.perf_counter() - begin)

    def _sums(self, inputs: Any, targets: Any, sample_weight: Any = None) -> dict[str, Any]:
        """Return one batch's sums."""
        outputs = self._model(inputs_for(self._model, inputs), training=False)
        part = with_model_losses(self._loss(targets, outputs, sample_weight), self._model)
        return {
            "loss": tf.cast(tf.stack([part.total, part.weight]), tf.float64),
            "metrics": self._metrics.sums_of(targets, outputs, sample_weight),
        }


class AsynchronousPredictor:
    """Predicts each batch on a worker."""

    def __init__(self, backend: Backend, workers: Workers, model: Any) -> None:
        self._workers = workers
        self._outputs = tf.function(
            lambda inputs: backend.run(lambda own: model(inputs_for(model, own), training=False), inputs),
            autograph=False,
            reduce_retracing=True,
        )

    def __call__(self, batches: Iterable[Batch]) -> Any:
        """Return the outputs [samples, …] in the model's structure and input order. Raises DataError if empty."""
        outcomes = [self._workers.schedule(self._outputs, batch.inputs) for batch in batches]
        if not outcomes:
            raise DataError("There is nothing to predict: the data hold no samples.")
        return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *(one.fetch() for one in outcomes))


def _weight(outcomes: Iterable[Future]) -> float:
    return float(sum(outcome.fetch()["loss"][1] for outcome in outcomes))


def _mean(outcomes: Sequence[Future]) -> float:
    weight = _weight(outcomes)
    return float(sum(outcome.fetch()["loss"][0] for outcome in outcomes)) / weight if weight else float("nan")
