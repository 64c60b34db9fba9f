"""Synchronous data parallelism: gradients are all-reduced, and every replica applies the same update."""

from collections.abc import Hashable
from functools import cached_property
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.gradients.weighted_reduction import WeightedReducer
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.fused import fused_updates
from hvdtrain.optim.precision import has_dynamic_scale
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import LocalGradients
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.rows_alone import changes_rows_alone
from hvdtrain.training.update_rules.split_model import SplitModel, overflowing_together


class AllReduceUpdate(UpdateRule):
    """Averages by weight over the replicas; applies the same update everywhere."""

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        super().__init__(backend, model, optimizer, options)
        self._reduction = (options or StepOptions()).reduction_on(backend)
        self._exchanges: dict[Hashable, tuple[SplitModel, WeightedReducer]] = {}
        self._prepare_exchange()

    @cached_property
    def updates_rows(self) -> bool:
        """Whether rows of tables are updated alone, as a trial of Keras' own optimizers shows.

        An optimizer of somebody else may not take rows, and a strategy would take part in the trial.
        """
        tables = any(isinstance(layer, keras.layers.Embedding) for layer in flatten_layers(self.model))
        by_rows = self._reduction.sparse_gradients != "dense" and not self._backend.capabilities.needs_builders
        known = type(innermost(self.optimizer)).__module__.startswith("keras.")
        return tables and by_rows and known and changes_rows_alone(self.optimizer)

    def follow_model(self, *, training: bool = True) -> None:
        """Also select the reducer for the trained variables."""
        super().follow_model(training=training)
        self._prepare_exchange()

    def _prepare_exchange(self) -> None:
        """Reuse the reducer cached for these variables: the compiled step refers to it."""
        key = tuple(zip(map(id, self._variables), self._paths, strict=True))
        if key not in self._exchanges:
            split = SplitModel(self._backend, self._variables)
            reducer = WeightedReducer(self._backend, self._reduction, split.reducer(self._reduction, self._paths))
            self._exchanges[key] = split, reducer
        self._split, self._reducer = self._exchanges[key]

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Reduce totals along with the gradients, and apply the mean. Collective."""
        gradients, totals = self._reducer.reduce(
            self._split.summed(local.gradients, self._paths),
            local.totals,
            self._paths,
            weight_at=1,
            expected=local.expected_weight,
            uniform=local.uniform,
        )
        gradients = self._split.replicated.agreed(gradients, self._paths, measure=measure)
        scales = self._split.exchanges and has_dynamic_scale(self.optimizer)
        norm = self._split.norm(gradients) if measure or scales or self._clipping.norm is not None else None
        if scales:
            gradients = overflowing_together(gradients, norm)
        if self.guard is not None:
            totals = self._split.agreed(totals)
        gradients, norm = self._clipped(gradients, norm)

        def apply() -> None:
            with fused_updates(self.optimizer):
                self.optimizer.apply(gradients, self._variables)

        return self._unless_bad(totals, apply), norm

    def diverging_gradients(self) -> dict[str, float]:
        """Return the deviations along tp."""
        return self._split.replicated.diverging_gradients(self._paths, self.model)
