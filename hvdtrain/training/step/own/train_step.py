"""Models with their own `train_step`: Keras' semantics, over all replicas."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.optim.precision import has_dynamic_scale, loss_scale_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.own.exchange import OptimizerExchange, offset_seeds
from hvdtrain.training.step.own.logs import StepLogs, plain_values
from hvdtrain.training.step.placeholder import restored_if_empty, updated_statistics
from hvdtrain.training.step.result import Measured, StepResult

_OVERRIDES = ("train_step", "test_step", "compute_loss", "compute_metrics")


def has_own_step(model: Any) -> bool:
    """Return whether a model's class overrides the step of `Model.fit`."""
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in _OVERRIDES)


class KerasTrainStep:
    """Calls the model's `train_step`; gradients are weighted by each replica's samples.

    Reports the model's results, as Keras does: the model's metrics count over an epoch, any other value is that of the
    last batch.
    """

    returns_logs = True

    def __init__(self, backend: Backend, state: TrainState, exchange: OptimizerExchange, logs: StepLogs) -> None:
        self._backend = backend
        self._state = state
        self._exchange = exchange
        self._logs = logs
        self._step = {
            measure: tf.function(lambda batch, m=measure: self._run(batch, m), autograph=False, reduce_retracing=True)
            for measure in (False, True)
        }
        self._results = self._compiled(lambda: self._logs.results("metric_so_far"))
        self._sums = self._compiled(lambda: self._logs.metric_sums("metric_sums"))

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Train on `batch`; `measure` fills `Measured`. Collective."""
        return self._step[measure](batch)

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Reset the metrics, or restore `sums` on the first replica."""
        self._logs.restore_sums(sums if sums and self._backend.index == 0 else {})

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return the state of each metric over all replicas. Collective."""
        return {name: [value.numpy().tolist() for value in values] for name, values in self._sums().items()}

    def metrics_so_far(self) -> dict[str, float]:
        """Return the model's last results over all replicas. Collective."""
        return plain_values(self._results())

    def epoch_metrics(self) -> dict[str, float]:
        """Return the model's last results over all replicas, and begin an epoch. Collective."""
        results = self.metrics_so_far()
        self._logs.reset()
        return results

    def _compiled(self, function: Callable[[], Any]) -> Callable[[], Any]:
        compiled: Callable[[], Any] = tf.function(lambda: self._backend.run(function), autograph=False)
        return compiled

    def _run(self, batch: Batch, measure: bool) -> StepResult:
        return self._backend.run(self._replica_step, batch, measure)

    def _replica_step(self, batch: Batch, measure: bool) -> StepResult:
        model, exchange = self._state.model, self._exchange
        self._state.seed_generators(self._backend.index, self._backend.process)
        rate = tf.convert_to_tensor(exchange.main.learning_rate)
        samples = samples_of(batch)
        with offset_seeds(self._backend.index):
            watched = take_step(model, batch, exchange, self._logs, measure=measure)
        totals = self._totals(batch, watched, samples)
        if not measure:
            return StepResult(totals, None)
        results = self._logs.results("train_metric")
        finite = tf.math.is_finite(zero_if_finite([v.read_value() for v in self._state.trainable.values()]))
        scale = loss_scale_of(exchange.main) if has_dynamic_scale(exchange.main) else None
        return StepResult(
            totals,
            Measured(
                learning_rate=rate,
                grad_norm=exchange.norm(),
                loss_scale=scale,
                metrics=results,
                finite=finite,
                so_far=results,
            ),
        )

    def _totals(self, batch: Batch, watched: list[tf.Tensor], samples: tf.Tensor) -> tf.Tensor:
        """Return [0 or NaN, 0, 0 or NaN] over all replicas: finiteness of results and data; no loss."""
        poison = zero_if_finite(tf.nest.flatten((batch.inputs, batch.targets)))
        local = tf.stack([zero_if_finite(watched), tf.constant(0.0), poison])
        return self._backend.all_reduce(tf.where(samples > 0, local, tf.zeros_like(local)), name="own_step//totals")


def take_step(
    model: Any, batch: Batch, exchange: OptimizerExchange, logs: StepLogs, *, measure: bool
) -> list[tf.Tensor]:
    """Call the model's `train_step` on a replica's batch; return values that must be finite.

    Raises ConfigError if it trains nothing, or returns invalid results.
    """
    samples = samples_of(batch)
    step = getattr(model.train_step, "python_function", model.train_step)
    still = [*updated_statistics(model), *logs.variables()]
    with (
        exchange.exchanging(samples, measure=measure),
        logs.recording(),
        restored_if_empty(still, batch.has_samples),
    ):
        returned = step(keras_data(batch))
    if not exchange.used:
        raise ConfigError(
            f"train_step of {type(model).__name__} must apply its gradients with an optimizer that is an attribute of "
            "the model, such as self.optimizer: gradients are exchanged there, and what is changed otherwise differs "
            "from rank to rank."
        )
    return logs.take(returned, samples)


def keras_data(batch: Batch) -> Any:
    """Return a batch in the form of `train_step`."""
    if batch.targets is None:
        return batch.inputs
    fields = (batch.inputs, batch.targets, batch.sample_weight)
    return fields if batch.sample_weight is not None else fields[:2]


def samples_of(batch: Batch) -> tf.Tensor:
    """Return the number of a replica's samples; 0 for a placeholder."""
    count = tf.shape(tf.nest.flatten(batch.inputs)[0])[0]
    return tf.cast(count, tf.float32) * tf.cast(batch.has_samples, tf.float32)
