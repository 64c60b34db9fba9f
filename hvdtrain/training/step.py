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
    bad_data: tf.Tensor
    """1 if this replica's inputs or targets hold NaN or infinite values, else 0."""


class GlobalSums(NamedTuple):
    """What every replica knows after the update."""

    total: tf.Tensor
    weight: tf.Tensor
    bad_data: tf.Tensor
    """Replicas whose data hold NaN or infinite values."""
    grad_norm: tf.Tensor
    """L2 norm of the reduced gradient; NaN where it was not asked for."""


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

    def update(self, local: LocalSums, measure: tf.Tensor) -> GlobalSums:
        """Apply one step; `measure` asks for the gradient's norm."""


class AllReduceUpdate:
    """Synchronous data parallelism: sum over the replicas, divide by the weight, the same update everywhere."""

    def __init__(self, backend: Backend, state: TrainState) -> None:
        self._backend = backend
        self._optimizer = state.optimizer
        self._paths = list(state.trainable)
        self._variables = state.model.trainable_variables
        self._reducer = GradientReducer(backend, ReductionOptions(op="sum"))

    def update(self, local: LocalSums, measure: tf.Tensor) -> GlobalSums:
        """Exchange loss and weight along with the gradients, then let the optimizer apply the mean."""
        share = tf.stack([local.total, local.weight, local.bad_data])
        *gradients, sums = self._reducer.reduce([*local.gradients, share], [*self._paths, "loss_and_weight"])
        total, weight, bad_data = sums[0], sums[1], sums[2]
        # Dividing here would be one more pass over all gradients: where it can be, it was done to the loss.
        mean = gradients if local.uniform else _rescale(gradients, local.nominal, weight)
        norm = tf.cond(measure, lambda: _global_norm(mean), lambda: tf.constant(float("nan"), tf.float64))
        self._optimizer.apply(mean, self._variables)
        return GlobalSums(total, weight, bad_data, norm)


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


class Health(NamedTuple):
    """Where numbers stopped being finite; steps are counted from 0."""

    bad_loss: int | None
    """First step with a loss that is not finite."""
    bad_data: int | None
    """First step with inputs or targets that are not finite."""
    finite_parameters: bool
    """Whether all parameters were finite after the last measured step: an activation may hide it from the loss."""


def _first_time() -> tf.Variable:
    return tf.Variable(-1, trainable=False, dtype=tf.int64)


def _note(first: tf.Variable, happened: tf.Tensor, step: tf.Tensor) -> None:
    """Keep `step` in `first` if this is the first time."""
    first.assign(tf.where(tf.logical_and(happened, first < 0), step, first))


def _step_of(first: tf.Variable) -> int | None:
    step = int(first)
    return None if step < 0 else step


def all_finite(tensors: list[Any]) -> tf.Tensor:
    """Return whether every element of the floating-point tensors among `tensors` is finite.

    A sum is finite if its terms are, short of overflow, and takes one pass without a mask in memory.
    """
    sums = [_wide_sum(tensor) for tensor in tensors if tf.is_tensor(tensor) and tensor.dtype.is_floating]
    return tf.reduce_all(tf.math.is_finite(tf.stack(sums))) if sums else tf.constant(True)


def _wide_sum(tensor: Any) -> tf.Tensor:
    narrow = tensor.dtype.size < 4
    return tf.cast(tf.reduce_sum(tf.cast(tensor, tf.float32) if narrow else tensor), tf.float64)


class TrainStep:
    """The compiled step of one replica, with the running sums that the loop reads when it logs."""

    def __init__(self, backend: Backend, state: TrainState, loss: LossFunction, rule: UpdateRule) -> None:
        self._backend = backend
        self._state = state
        self._loss = loss
        self._rule = rule
        self._sum = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._weight = tf.Variable(0.0, trainable=False, dtype=tf.float64)
        self._bad_loss = _first_time()
        self._bad_data = _first_time()
        self._finite = tf.Variable(True, trainable=False)
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

    def health(self) -> Health:
        """Return what the flags in the compiled step say by now; whether parameters are finite is looked at on
        measured steps.
        """
        return Health(_step_of(self._bad_loss), _step_of(self._bad_data), bool(self._finite))

    def _run(self, batch: Batch, measure: tf.Tensor) -> StepResult:
        return self._backend.run(self._replica_step, batch, measure)

    def _replica_step(self, batch: Batch, measure: tf.Tensor) -> StepResult:
        step = self._state.counter.read_value()
        self._state.seed_generators(self._backend.index)
        local, outputs = self.forward_backward(batch)
        sums = self._rule.update(local, measure)
        self._sum.assign_add(tf.cast(sums.total, tf.float64))
        self._weight.assign_add(tf.cast(sums.weight, tf.float64))
        _note(self._bad_loss, tf.logical_not(tf.math.is_finite(sums.total)), step)
        _note(self._bad_data, sums.bad_data > 0, step)
        parameters = list(self._state.trainable.values())
        self._finite.assign(tf.cond(measure, lambda: all_finite(parameters), self._finite.read_value))
        self._state.counter.assign(step + 1)
        return StepResult(tf.math.divide_no_nan(sums.total, sums.weight), sums.grad_norm, outputs)

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
        bad_data = 1.0 - tf.cast(all_finite(tf.nest.flatten((batch.inputs, batch.targets))), total.dtype)
        return LocalSums(gradients, total, weight, nominal, part.uniform, bad_data), outputs
