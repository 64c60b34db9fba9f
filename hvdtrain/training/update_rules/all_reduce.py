"""Synchronous data parallelism: gradients are all-reduced, and every replica applies the same update."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.gradients.weighted_reduction import WeightedReducer
from hvdtrain.optim.clipping import global_norm
from hvdtrain.optim.fused import fused_updates
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.forward_backward import LocalGradients
from hvdtrain.training.update_rules.base import UpdateRule


class AllReduceUpdate(UpdateRule):
    """Sum over the replicas, divide by the weight, update alike everywhere; see `UpdateRule`."""

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        super().__init__(backend, model, optimizer, options)
        self._reducer = WeightedReducer(backend, (options or StepOptions()).reduction_on(backend))

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Exchange the totals along with the gradients, then let the optimizer apply the mean."""
        gradients, totals = self._reducer.reduce(
            local.gradients,
            local.totals,
            self._paths,
            weight_at=1,
            expected=local.expected_weight,
            uniform=local.uniform,
        )
        norm = global_norm(gradients) if measure or self._clipping.norm is not None else None
        gradients, norm = self._clipped(gradients, norm)
        with fused_updates(self.optimizer):
            self.optimizer.apply(gradients, self._variables)
        return totals, norm
