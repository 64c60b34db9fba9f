"""Models with a `train_step` of their own: Keras' semantics, over all replicas."""

import time
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.batch import Batch
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
from hvdtrain.optim.precision import has_dynamic_scale, loss_scale_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.evaluation.hooks import EvaluationHooks
from hvdtrain.training.objective.metrics import BoundMetric, MetricSet
from hvdtrain.training.step.forward_backward import zero_if_finite
from hvdtrain.training.step.placeholder import moved_by, unmoved
from hvdtrain.training.step.result import Measured, StepResult

_OVERRIDES = ("train_step", "test_step", "compute_loss", "compute_metrics")


def has_own_step(model: Any) -> bool:
    """Tell whether a model's class replaces what `Model.fit` does in a step."""
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _OVERRIDES)


class KerasTrainStep:
    """Calls the model's `train_step`; its optimizer exchanges the gradients, weighted by each replica's samples.

    Args:
        backend: the replicas.
        state: what is trained.
        optimizer: the one that the model was compiled with.
    """

    returns_logs = False

    def __init__(self, backend: Backend, state: TrainState, optimizer: DistributedOptimizer) -> None:
        self._backend = backend
        self._state = state
        self._optimizer = optimizer
        self._metrics = _metrics_of(state.model, backend)
        self._step = {
            measure: tf.function(lambda batch, m=measure: self._run(batch, m), autograph=False, reduce_retracing=True)
            for measure in (False, True)
        }

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Train on `batch`; `measure` asks for what `Measured` holds."""
        return self._step[measure](batch)

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Do nothing: the model's metrics are reset at each step."""

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return nothing, as `epoch_metrics`."""
        return {}

    def metrics_so_far(self) -> dict[str, float]:
        """Return nothing, as `epoch_metrics`."""
        return {}

    def epoch_metrics(self) -> dict[str, float]:
        """Return nothing: the model's metrics are reset at each step."""
        return {}

    def _run(self, batch: Batch, measure: bool) -> StepResult:
        return self._backend.run(self._replica_step, batch, measure)

    def _replica_step(self, batch: Batch, measure: bool) -> StepResult:
        model, optimizer = self._state.model, self._optimizer
        self._state.seed_generators(self._backend.index)
        rate = tf.convert_to_tensor(optimizer.learning_rate)
        samples = _samples(batch)
        self._metrics.reset()
        step = getattr(model.train_step, "python_function", model.train_step)
        with optimizer.counting(samples), unmoved(moved_by(model), batch.has_samples):
            logs = step(keras_data(batch))
        if optimizer.norm is None:
            raise ConfigError(
                f"train_step of {type(model).__name__} must apply its gradients with self.optimizer, which exchanges "
                "them: what it changes otherwise differs from rank to rank."
            )
        totals = self._totals(batch, logs, samples)
        if not measure:
            return StepResult(totals, None)
        _forget_placeholder(self._metrics, batch)
        self._metrics.reduce("train_metric")
        results = {name: tf.convert_to_tensor(value) for name, value in model.get_metrics_result().items()}
        results.pop("loss", None)
        finite = tf.math.is_finite(zero_if_finite([v.read_value() for v in self._state.trainable.values()]))
        scale = loss_scale_of(optimizer.inner_optimizer) if has_dynamic_scale(optimizer.inner_optimizer) else None
        return StepResult(totals, Measured(rate, optimizer.norm, scale, results, finite))

    def _totals(self, batch: Batch, logs: Any, samples: tf.Tensor) -> tf.Tensor:
        if not isinstance(logs, dict) or "loss" not in logs:
            raise ConfigError(f"train_step must return a dict with 'loss' in it. Received: {logs!r}.")
        poison = zero_if_finite(tf.nest.flatten((batch.inputs, batch.targets)))
        local = tf.stack([tf.cast(logs["loss"], tf.float32) * samples, samples, poison])
        return self._backend.all_reduce(tf.where(samples > 0, local, tf.zeros_like(local)), name="gradient//totals")


class KerasEvaluator:
    """Calls the model's `test_step` on every replica's part of the data and adds up the metrics' variables."""

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model
        self._metrics = _metrics_of(model, backend)
        self._update = tf.function(self._update_batch, autograph=False, reduce_retracing=True)
        self._reduce = tf.function(lambda: self._metrics.reduce("evaluation"), autograph=False)
        self._look = tf.function(self._look_at_all, autograph=False)

    def __call__(self, batches: Iterable[Batch], hooks: EvaluationHooks | None = None) -> Evaluation:
        """Evaluate on `batches`, of which each replica must have the same number; `hooks` may look in.

        Raises:
            DataError: there is nothing to evaluate.
        """
        begin = time.perf_counter()
        self._metrics.reset()
        hooks = hooks or EvaluationHooks()
        count = 0
        for batch in self._backend.distribute(batches):
            hooks.begin_test_step(count)
            self._update(batch)
            hooks.end_test_step(count, self._so_far)
            count += 1
        if not count:
            raise DataError("There is nothing to evaluate: the validation data hold no samples.")
        self._reduce()
        results = {name: float(value) for name, value in self._model.get_metrics_result().items()}
        return Evaluation(results.pop("loss", float("nan")), results, time.perf_counter() - begin)

    def _so_far(self) -> dict[str, float]:
        return {name: float(value) for name, value in self._look().items()}

    def _look_at_all(self) -> dict[str, tf.Tensor]:
        return self._metrics.results_so_far("evaluation_so_far", self._model.get_metrics_result)

    def _update_batch(self, batch: Batch) -> None:
        def count() -> tf.Tensor:
            self._model.test_step(keras_data(batch))
            return tf.constant(True)

        tf.cond(tf.cast(batch.has_samples, tf.float32) > 0, count, lambda: tf.constant(False))


def keras_data(batch: Batch) -> tuple[Any, ...]:
    """Return a batch as `train_step` takes it."""
    if batch.sample_weight is None:
        return batch.inputs, batch.targets
    return batch.inputs, batch.targets, batch.sample_weight


def _samples(batch: Batch) -> tf.Tensor:
    count = tf.shape(tf.nest.flatten(batch.inputs)[0])[0]
    return tf.cast(count, tf.float32) * tf.cast(batch.has_samples, tf.float32)


def _metrics_of(model: Any, backend: Backend) -> MetricSet:
    return MetricSet([BoundMetric(metric.name, metric, "", weighted=False) for metric in model.metrics], backend)


def _forget_placeholder(metrics: MetricSet, batch: Batch) -> None:
    """Take out of the metrics what a placeholder's sample put into them: they hold this batch alone."""
    for bound in metrics.bound:
        for variable in bound.metric.variables:
            value = tf.convert_to_tensor(variable)
            variable.assign(tf.where(tf.cast(batch.has_samples, tf.float32) > 0, value, tf.zeros_like(value)))
