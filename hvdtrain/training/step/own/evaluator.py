"""Evaluation by a model's own `test_step`, over all replicas."""

import time
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.evaluation.hooks import EvaluationHooks
from hvdtrain.training.step.own.logs import StepLogs, plain_figures
from hvdtrain.training.step.own.train_step import keras_data, samples_of


class KerasEvaluator:
    """Calls the model's `test_step` on every replica's part of the data.

    Metrics are over all samples, and so is the mean of anything else that it returns. What the model's metrics have
    counted in training is kept.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model
        self._logs = StepLogs(backend, model, "test_step", accumulate=True)
        self._update = tf.function(self._update_batch, autograph=False, reduce_retracing=True)
        self._results = tf.function(lambda: backend.run(self._logs.results, "evaluation"), autograph=False)
        self._look = tf.function(lambda: backend.run(self._logs.results, "evaluation_so_far"), autograph=False)

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, of which each replica must have the same number; `hooks` may look in.

        Raises:
            DataError: there is nothing to evaluate.
        """
        begin = time.perf_counter()
        kept = [(variable, variable.numpy()) for variable in self._logs.variables()]
        self._logs.reset()
        hooks = hooks or EvaluationHooks()
        count = 0
        for batch in self._backend.distribute(batches):
            hooks.begin_test_step(count)
            self._update(batch)
            hooks.end_test_step(count, self._so_far)
            count += 1
        if not count:
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        results = plain_figures(self._results())
        self._model.reset_metrics()
        for variable, value in kept:
            variable.assign(value)
        return Evaluation(results.pop("loss", None), results, time.perf_counter() - begin)

    def _so_far(self) -> dict[str, float]:
        return plain_figures(self._look())

    def _update_batch(self, batch: Batch) -> None:
        def count() -> tf.Tensor:
            with self._logs.recording():
                returned = self._model.test_step(keras_data(batch))
            self._logs.take(returned, samples_of(batch))
            return tf.constant(True)

        # Traced without samples too: every replica has to know what the step returns.
        tf.cond(tf.cast(batch.has_samples, tf.float32) > 0, count, lambda: tf.constant(False))
