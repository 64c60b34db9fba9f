"""One optimizer step as one compiled function: forward, backward, exchange, update."""

from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch
from hvdtrain.training.compiled import compile_for
from hvdtrain.training.losses import LossFunction
from hvdtrain.training.reduction import Gradient, GradientReducer, ReductionOptions
from hvdtrain.training.state import TrainState


class LocalSums(NamedTuple):
    """What one replica knows after its backward pass; the sums over all replicas give the step."""

    gradients: list[Gradient]
    """Gradients of total / nominal."""
    total: tf.Tensor
    """Sum of the weighted losses."""
    weight: tf.Tensor
    """Sum of the weights."""
    nominal: tf.Tensor
    """What the weights of all replicas add up to when every element counts once: the same on all of them."""
    uniform: bool
    """Whether the weights do add up to `nominal`: then the reduced gradients are the mean already."""


class StepResult(NamedTuple):
    """What a step leaves behind, as tensors that nobody has to wait for."""

    loss: tf.Tensor
    """Mean loss over the global batch, before the update."""
    grad_norm: tf.Tensor
    """Global L2 norm of the reduced gradient; NaN where it was not asked for."""
    outputs: Any
    """This replica's model outputs."""


class UpdateRule(Protocol):
    """Turns local sums into a changed state: it owns the exchange and the optimizer."""

    def update(self, local: LocalSums, measure: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Apply one step; return the global loss total, the global weight and the gradient's norm or NaN."""


class AllReduceUpdate:
    """Synchronous data parallelism: sum over the replicas, divide by the weight, the same update everywhere."""

    def __init__(self, backend: Backend, state: TrainState) -> None:
        self._backend = backend
        self._optimizer = state.optimizer
        self._paths = list(state.trainable)
        self._variables = state.model.trainable_variables
        self._reducer = GradientReducer(backend, ReductionOptions(op="sum"))

    def update(self, local: LocalSums, measure: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Exchange loss and weight along with the gradients, then let the optimizer apply the mean."""
        share = tf.stack([local.total, local.weight])
        *gradients, sums = self._reducer.reduce([*local.gradients, share], [*self._paths, "loss_and_weight"])
        total, weight = sums[0], sums[1]
        # Dividing here would be one more pass over all gradients: where it can be, it was done to the loss.
        mean = gradients if local.uniform else _rescale(gradients, local.nominal, weight)
        norm = tf.cond(measure, lambda: _global_norm(mean), lambda: tf.constant(float("nan"), tf.float64))
        self._optimizer.apply(mean, self._variables)
        return total, weight, norm


def _rescale(gradients: list[Gradient], nominal: tf.Tensor, weight: tf.Tensor) -> list[Gradient]:
    """Turn gradients of sum / nominal into gradients of sum / weight."""
    factor = tf.math.divide_no_nan(nominal, weight)
    return [None if g is None else _times(g, factor) for g in gradients]


def _times(gradient: Any, factor: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


def _global_norm(gradients: list[Gradient]) -> tf.Tensor:
    parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients if g is not None]
    return tf.sqrt(tf.add_n([tf.cast(tf.reduce_sum(tf.square(p)), tf.float64) for p in parts]))


class TrainStep:
    """The compiled step of one replica, with the running sums that the loop reads when it logs."""

    def __init__(self, backend: Backend, state: TrainState, loss: LossFunction, rule: UpdateRule) -> None:
        self._backend = backend
        self._state = state
        self._loss = loss
        self._rule = rule
        self._sum = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._weight = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._first_bad = tf.Variable(-1, trainable=False, dtype=tf.int64)
        self._measure = {flag: tf.constant(flag) for flag in (False, True)}
        self._compiled: Any = None

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Train on `batch`; `measure` asks for the gradient's norm."""
        if self._compiled is None:
            self._compiled = compile_for(batch, self._run, tf.TensorSpec([], tf.bool))
        return self._compiled(batch, self._measure[measure])

    def take_loss(self) -> tuple[float, float]:
        """Return the sums of weighted losses and of weights since the last call, over all replicas."""
        sums = float(self._sum), float(self._weight)
        self._sum.assign(0.0)
        self._weight.assign(0.0)
        return sums

    def first_bad_step(self) -> int | None:
        """Return the first step (from 0) whose loss was not finite, or None."""
        step = int(self._first_bad)
        return None if step < 0 else step

    def _run(self, batch: Batch, measure: tf.Tensor) -> StepResult:
        return self._backend.run(self._replica_step, batch, measure)

    def _replica_step(self, batch: Batch, measure: tf.Tensor) -> StepResult:
        step = self._state.counter.read_value()
        self._state.seed_generators(self._backend.index)
        local, outputs = self.forward_backward(batch)
        total, weight, norm = self._rule.update(local, measure)
        loss = tf.math.divide_no_nan(total, weight)
        self._sum.assign_add(tf.cast(total, tf.float64))
        self._weight.assign_add(tf.cast(weight, tf.float64))
        bad = tf.logical_and(self._first_bad < 0, tf.logical_not(tf.math.is_finite(total)))
        self._first_bad.assign(tf.where(bad, step, self._first_bad))
        self._state.counter.assign(step + 1)
        return StepResult(loss, norm, outputs)

    def forward_backward(self, batch: Batch) -> tuple[LocalSums, Any]:
        """Run one microbatch; a replica whose batch is a placeholder contributes zeros."""
        with tf.GradientTape() as tape:
            outputs = self._state.model(batch.inputs, training=True)
            part = self._loss(batch.targets, outputs, batch.sample_weight)
            present = tf.cast(batch.present, part.total.dtype)
            total, weight = part.total * present, part.weight * present
            nominal = part.elements_per_sample * tf.cast(batch.global_samples, part.total.dtype)
            objective = total / nominal
        gradients = tape.gradient(objective, list(self._state.trainable.values()))
        return LocalSums(gradients, total, weight, nominal, part.uniform), outputs
