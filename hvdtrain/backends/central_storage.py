"""Backend for tf.distribute's CentralStorageStrategy: replicas in one process share one copy of each variable."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Capabilities
from hvdtrain.backends.tf_distribute import StrategyBackend
from hvdtrain.compat.tensorflow import outside_of_strategy


class CentralStorageBackend(StrategyBackend):
    """Data-parallel training in which each replica returns its sums, and the shared variables take their total."""

    capabilities = Capabilities(
        sends_together=True,
        needs_builders=True,
        shares_variables=True,
        step_factory="hvdtrain.training.central_storage:CentralStepFactory",
    )

    def add_sums(self, variables: Sequence[tf.Variable], sums: Sequence[tf.Tensor], *, first: bool = False) -> None:
        """Add the sum of each of `sums` over the replicas to its variable, once; `first` assigns it. Collective.

        Assigned by the replicas, a variable would get as many times what it held before as there are replicas.
        """

        def add(strategy: Any, *each: Any) -> None:
            for variable, own in zip(variables, each, strict=True):
                total = strategy.reduce(tf.distribute.ReduceOp.SUM, own, axis=None)
                (variable.assign if first else variable.assign_add)(total)

        self._context("sums").merge_call(add, args=tuple(sums))

    def prepare(self, optimizer: Any) -> None:
        """Also let the replicas apply gradients together, once, as they share the optimizer's state."""
        super().prepare(optimizer)
        if optimizer is None or "apply" in vars(optimizer):
            return
        kind = type(optimizer)

        def apply(grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
            def once(strategy: Any, *each: Any) -> None:
                reduced = [strategy.experimental_local_results(gradient)[0] for gradient in each]
                with outside_of_strategy():
                    kind.apply(optimizer, reduced, trainable_variables)

            if self._is_replica():
                self._context("gradients").merge_call(once, args=tuple(grads))
            else:
                kind.apply(optimizer, grads, trainable_variables)

        vars(optimizer)["apply"] = apply  # Keras does not track it
