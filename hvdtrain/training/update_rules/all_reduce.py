"""How local sums become a changed state: the exchange, clipping and the optimizer."""

from dataclasses import replace

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, ReduceOp
from hvdtrain.gradients.reduction import Gradient, GradientReducer, ReductionOptions, scaled
from hvdtrain.optim.clipping import Clipping, global_norm
from hvdtrain.optim.fused import fused_updates
from hvdtrain.optim.precision import loss_scale_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.step.forward_backward import LocalGradients


class AllReduceUpdate:
    """Synchronous data parallelism: sum over the replicas, divide by the weight, the same update everywhere.

    Args:
        backend: the replicas.
        state: what is trained.
        options: how gradients travel, and what is made of the replicas' gradients: `average` gives the gradient of
            the mean over the global batch; `sum` that times the number of replicas; `adasum` combines the replicas'
            own means (Maleki et al. 2020).
        clipping: bounds on the reduced, unscaled gradient.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        options: ReductionOptions | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        options = options or ReductionOptions()
        self._op: ReduceOp = options.op
        self._backend = backend
        self._optimizer = state.optimizer
        self._paths = list(state.trainable)
        self._variables = state.model.trainable_variables
        self._clipping = clipping or Clipping()
        # An average is formed here, by weights: what travels is a sum.
        self._reducer = GradientReducer(backend, replace(options, op="sum") if options.op == "average" else options)

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Exchange the totals along with the gradients, then let the optimizer apply the mean."""
        gradients, totals = self._adasum(local) if self._op == "adasum" else self._sum(local)
        gradients, norm = self._clipped(gradients, measure=measure)
        with fused_updates(self._optimizer):
            self._optimizer.apply(gradients, self._variables)
        return totals, norm

    def _sum(self, local: LocalGradients) -> tuple[list[Gradient], tf.Tensor]:
        *gradients, totals = self._reducer.reduce(
            [*local.gradients, _after(local.totals, local.gradients)], [*self._paths, "totals"], exact=["totals"]
        )
        # Dividing here would be one more pass over all gradients: where it can be, it was done to the loss.
        if not local.uniform:
            gradients = _times(gradients, tf.math.divide_no_nan(local.expected_weight, totals[1]))
        if self._op == "sum":
            gradients = _times(gradients, float(self._backend.size))
        return gradients, totals

    def _adasum(self, local: LocalGradients) -> tuple[list[Gradient], tf.Tensor]:
        own = _times(local.gradients, tf.math.divide_no_nan(local.expected_weight, local.totals[1]))
        return self._reducer.reduce(own, self._paths), self._backend.all_reduce(local.totals, name="gradient/totals")

    def _clipped(self, gradients: list[Gradient], *, measure: bool) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return the gradients within their bounds, and the norm that they had without the loss scale."""
        norm = global_norm(gradients) if measure or self._clipping.norm is not None else None
        # What a LossScaleOptimizer is given is scaled still; its bounds are scaled instead.
        scale = loss_scale_of(self._optimizer)
        clipped = self._clipping.apply(gradients, norm, scale)
        return clipped, None if norm is None else norm / tf.cast(scale, norm.dtype)


def _after(totals: tf.Tensor, gradients: list[Gradient]) -> tf.Tensor:
    """Hold the totals back until the last gradient is there.

    Sent as soon as the loss is known, they would make a message of their own: on a step of 4 ms that costs 5 %.
    """
    last = next((g for g in gradients if g is not None), totals)
    with tf.control_dependencies([last.values if isinstance(last, tf.IndexedSlices) else last]):
        return tf.identity(totals)


def _times(gradients: list[Gradient], factor: tf.Tensor | float) -> list[Gradient]:
    return [scaled(gradient, factor) for gradient in gradients]
