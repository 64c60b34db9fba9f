"""One optimizer step as one compiled function: forward, backward, exchange, update."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch
from hvdtrain.training.losses import LossFunction, with_model_losses
from hvdtrain.training.metrics import MetricSet
from hvdtrain.training.reduction import Gradient, GradientReducer, ReductionOptions
from hvdtrain.training.state import TrainState


class LocalSums(NamedTuple):
    """What one replica knows after its backward pass; the sums over all replicas give the step."""

    gradients: list[Gradient]
    """Gradients of total / nominal."""
    totals: tf.Tensor
    """[3]: sum of the weighted losses, sum of the weights, and zero or, where this replica's inputs or targets are
    not finite, NaN: all three are added up over the replicas."""
    nominal: tf.Tensor
    """What the weights of all replicas add up to when every element counts once: the same on all of them."""
    uniform: bool
    """Whether the weights do add up to `nominal`: then the reduced gradients are the mean already."""


class StepResult(NamedTuple):
    """What a step leaves behind, as tensors that nobody has to wait for."""

    totals: tf.Tensor
    """[3]: `LocalSums.totals` over all replicas."""
    measured: "Measured | None"
    """What was asked for besides, on logged steps."""


class Measured(NamedTuple):
    """What costs a pass over memory or a message of its own."""

    learning_rate: tf.Tensor
    """The rate of this update."""
    grad_norm: tf.Tensor
    """Global L2 norm of the reduced gradient."""
    metrics: dict[str, tf.Tensor]
    """Training metrics of this global batch, by name."""
    finite: tf.Tensor
    """Whether all parameters are finite after the update."""


class UpdateRule(Protocol):
    """Turns local sums into a changed state: it owns the exchange and the optimizer."""

    def update(self, local: LocalSums, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Apply one step; return the totals over all replicas, and the gradient's norm if `measure` asks for it."""


class AllReduceUpdate:
    """Synchronous data parallelism: sum over the replicas, divide by the weight, the same update everywhere."""

    def __init__(self, backend: Backend, state: TrainState) -> None:
        self._backend = backend
        self._optimizer = state.optimizer
        self._paths = list(state.trainable)
        self._variables = state.model.trainable_variables
        self._reducer = GradientReducer(backend, ReductionOptions(op="sum"))

    def update(self, local: LocalSums, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Exchange the totals along with the gradients, then let the optimizer apply the mean."""
        *gradients, totals = self._reducer.reduce(
            [*local.gradients, _after(local.totals, local.gradients)], [*self._paths, "totals"]
        )
        # Dividing here would be one more pass over all gradients: where it can be, it was done to the loss.
        mean = gradients if local.uniform else _rescale(gradients, local.nominal, totals[1])
        norm = _global_norm(mean) if measure else None
        self._optimizer.apply(mean, self._variables)
        return totals, norm


def _after(totals: tf.Tensor, gradients: list[Gradient]) -> tf.Tensor:
    """Hold the totals back until the last gradient is there.

    Sent as soon as the loss is known, they would make a message of their own: on a step of 4 ms that costs 5 %.
    """
    last = next((g for g in gradients if g is not None), totals)
    with tf.control_dependencies([last.values if isinstance(last, tf.IndexedSlices) else last]):
        return tf.identity(totals)


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
    """The compiled step of one replica."""

    def __init__(
        self, backend: Backend, state: TrainState, loss: LossFunction, metrics: MetricSet, rule: UpdateRule
    ) -> None:
        self._backend = backend
        self._state = state
        self._loss = loss
        self._metrics = metrics
        self._rule = rule
        # With what is measured and without are two graphs: a condition in one graph costs 5 % of a small step.
        self._general = {
            measure: tf.function(partial(self._run, measure=measure), autograph=False, reduce_retracing=True)
            for measure in (False, True)
        }
        # So does a batch whose size is not static, another 5 % a whole Batch as the argument, and 2 % the search for
        # the graph that fits the arguments: all of that is settled once for each kind of batch.
        self._special: dict[Hashable, Callable[..., StepResult]] = {}

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Train on `batch`; `measure` asks for what `Measured` holds."""
        inputs, targets, weights, *share = batch
        if tf.is_tensor(batch.global_samples):
            return self._general[measure](batch)
        parts = (inputs, targets) if weights is None else (inputs, targets, weights)
        key = (measure, *share, *((part.shape, part.dtype) for part in tf.nest.flatten(parts)))
        if key not in self._special:
            self._special[key] = self._specialize(parts, share, measure)
        return self._special[key](*parts)

    def _specialize(self, parts: tuple[Any, ...], share: list[Any], measure: bool) -> Callable[..., StepResult]:
        """Compile the step for batches that have `share`, the fields behind the tensors, in common."""

        def run(*parts: Any) -> StepResult:
            batch = Batch(parts[0], parts[1], parts[2] if parts[2:] else None, *share)
            return self._run(batch, measure=measure)

        return tf.function(run, autograph=False).get_concrete_function(*parts)

    def _run(self, batch: Batch, *, measure: bool) -> StepResult:
        return self._backend.run(self._replica_step, batch, measure)

    def _replica_step(self, batch: Batch, measure: bool) -> StepResult:
        self._state.seed_generators(self._backend.index)
        rate = tf.convert_to_tensor(self._state.optimizer.learning_rate)
        local, outputs = self.forward_backward(batch)
        totals, norm = self._rule.update(local, measure=measure)
        if not measure:
            return StepResult(totals, None)
        metrics = self._metrics.measure(batch.targets, outputs, batch.sample_weight, batch.present)
        finite = tf.math.is_finite(zero_if_finite([v.read_value() for v in self._state.trainable.values()]))
        return StepResult(totals, Measured(rate, norm, metrics, finite))

    def forward_backward(self, batch: Batch) -> tuple[LocalSums, Any]:
        """Run one microbatch; a replica whose batch is a placeholder contributes zeros."""
        poison = tf.constant(0.0) if batch.finite else zero_if_finite(tf.nest.flatten((batch.inputs, batch.targets)))
        with tf.GradientTape() as tape:
            outputs = self._state.model(batch.inputs, training=True)
            part = with_model_losses(self._loss(batch.targets, outputs, batch.sample_weight), self._state.model)
        dtype = part.total.dtype
        present = tf.cast(batch.present, dtype)
        nominal = part.elements_per_sample * tf.cast(batch.global_samples, dtype)
        # The scale enters as the seed of the backward pass: as a part of the loss it would have gradients of its own.
        gradients = tape.gradient(part.total, list(self._state.trainable.values()), output_gradients=present / nominal)
        totals = tf.stack([part.total, part.weight, tf.cast(poison, dtype)]) * present
        return LocalSums(gradients, totals, nominal, part.uniform), outputs


def zero_if_finite(tensors: list[Any]) -> tf.Tensor:
    """Return 0 if every element of the floating-point tensors among `tensors` is finite, else NaN.

    A sum is finite if its terms are, short of overflow; it takes one pass and no mask in memory.
    """
    sums = [_wide_sum(tensor) for tensor in tensors if tf.is_tensor(tensor) and tensor.dtype.is_floating]
    return 0.0 * tf.add_n(sums) if sums else tf.constant(0.0)


def _wide_sum(tensor: Any) -> tf.Tensor:
    narrow = tensor.dtype.size < 4
    return tf.cast(tf.reduce_sum(tf.cast(tensor, tf.float32) if narrow else tensor), tf.float32)
