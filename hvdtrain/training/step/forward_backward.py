"""Forward and backward pass of a replica."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.layers.exchanging import exchanging_layers, samples_of
from hvdtrain.layers.fused_batch_norm import fused_normalization, fusible_layers
from hvdtrain.layers.sync_batch_norm import replicas_of, sync_layers
from hvdtrain.optim.precision import loss_scale_of
from hvdtrain.parallel.outputs import local_outputs
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.objective.losses import LossFunction, with_model_losses
from hvdtrain.training.objective.outputs import inputs_for
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.parameters import Parameters, Pass
from hvdtrain.training.step.placeholder import counted, restored_if_empty, updated_statistics


class LocalGradients(NamedTuple):
    """Result of one replica's backward pass; sums over all replicas give the step."""

    gradients: list[Gradient]
    """Gradients of loss scale x total / expected_weight; for some update rules, shards of global sums."""
    totals: tf.Tensor
    """[3]: sum of weighted losses, sum of weights, and zero, or NaN if inputs or targets are not finite.

    Each is summed over the replicas.
    """
    expected_weight: tf.Tensor
    """Global sum of weights if every element counts once: the same on all replicas."""
    uniform: bool
    """Whether the weights sum to `expected_weight`: then the reduced gradients are already the mean."""
    poison: tf.Tensor | None = None
    """As in `Collected`."""


class ForwardBackward:
    """Calls the model (or `forward`) and computes the gradients of `parameters`; `jit` uses XLA."""

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        loss: LossFunction,
        *,
        forward: Callable[..., Any] | None = None,
        jit: bool = False,
        parameters: Parameters | None = None,
    ) -> None:
        self._backend = backend
        self._state = state
        self._loss = loss
        self._forward = forward or state.model
        self._synchronized = sync_layers(state.model)
        self._exchanging = exchanging_layers(state.model)
        self._fusible = fusible_layers(state.model)
        self._jit = jit
        self._parameters = parameters or Parameters(state.trainable)

    def __call__(
        self, batch: Batch, *, within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> tuple[LocalGradients, Any]:
        """Run a microbatch within `within()`; return sums (zeros for a placeholder) and outputs."""
        if not self._jit:
            return self._both(batch, within)
        tensors = batch[:5]
        uniform: list[bool] = []

        def compiled(*parts: Any) -> tuple[Any, ...]:
            given = dict(zip(Batch._fields, parts, strict=False))
            local, outputs = self._both(batch._replace(**given), within)
            uniform.append(local.uniform)
            return local.gradients, local.totals, local.expected_weight, outputs

        gradients, totals, expected_weight, outputs = tf.function(compiled, autograph=False, jit_compile=True)(*tensors)
        return LocalGradients(gradients, totals, expected_weight, uniform[-1]), outputs

    def _both(self, batch: Batch, within: Callable[[], AbstractContextManager[Any]]) -> tuple[LocalGradients, Any]:
        # Synchronized statistics are updated on all replicas, including those without samples.
        statistics = updated_statistics(self._state.model, but=self._synchronized)
        # Around both passes: both communicate, and --recompute calls layers in the second.
        with (
            restored_if_empty(statistics, batch.has_samples),
            replicas_of(self._synchronized, self._backend, batch.has_samples),
            samples_of(self._exchanging, batch.has_samples),
            fused_normalization(self._fusible),
        ):
            return self._sums(batch, within)

    def _sums(self, batch: Batch, within: Callable[[], AbstractContextManager[Any]]) -> tuple[LocalGradients, Any]:
        sources = self._parameters.sources()
        with self._parameters.passes(batch.has_samples) as passes:
            return self._sums_of(sources, passes, batch, within)

    def _sums_of(
        self,
        sources: list[tf.Variable],
        passes: Pass,
        batch: Batch,
        within: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[LocalGradients, Any]:
        poison = tf.constant(0.0) if batch.finite else zero_if_finite(tf.nest.flatten((batch.inputs, batch.targets)))
        with tf.GradientTape() as tape, within():
            inputs = inputs_for(self._state.model, batch.inputs)
            outputs = local_outputs(self._state.model, self._forward, inputs, training=True)
            part = with_model_losses(self._loss(batch.targets, outputs, batch.sample_weight), self._state.model)
        dtype = part.total.dtype
        has_samples = tf.cast(batch.has_samples, dtype)
        expected_weight = part.elements_per_sample * tf.cast(batch.global_samples, dtype)
        # The scale is the upstream gradient: as a factor of the loss it would have its own gradients.
        seed = has_samples / expected_weight * tf.cast(loss_scale_of(self._state.optimizer), dtype)
        passes.end_forward()
        gradients, poison_by_gradient = passes.collected(tape.gradient(part.total, sources, output_gradients=seed))
        totals = counted(tf.stack([part.total, part.weight, tf.cast(poison, dtype)]), batch.has_samples)
        uniform = part.uniform and not batch.nominal
        return LocalGradients(
            gradients=gradients,
            totals=totals,
            expected_weight=expected_weight,
            uniform=uniform,
            poison=poison_by_gradient,
        ), outputs
