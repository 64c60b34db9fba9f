"""A Keras optimizer that takes local gradients and applies those of all replicas."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.keras_variables import trained_variables
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.training import CompressionName
from hvdtrain.gradients.collectives import Op
from hvdtrain.gradients.gradient_exchange import GradientExchange, op_of_updates, wire_name
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.clipping import Clipping, global_norm
from hvdtrain.optim.fused import fused_updates
from hvdtrain.optim.precision import loss_scale_of
from hvdtrain.state.variables import as_written


@keras.saving.register_keras_serializable(package="hvdtrain")
class DistributedOptimizer(keras.optimizers.Optimizer):
    """Wraps a Keras optimizer: `apply` exchanges the gradients first, so that a `train_step` of any shape may call it.

    Args:
        inner_optimizer: applies the reduced gradients; a LossScaleOptimizer is given them scaled still.
        op: `average`, `sum` or `adasum` (MPI only), or one of Horovod's constants.
        compression: `none`, `fp16` or `bf16` on the wire, or one of Horovod's compressors.
        groups: number of groups of gradients that leave together; 0: each leaves as soon as it is computed,
            small ones together.
        sparse_as_dense: see `DistributedGradientTape`.
        gradient_predivide_factor: divide by it before the sum, and by size / factor after.
        clip_norm: bound on the L2 norm of the whole reduced gradient.
        clip_value: bound on each of its elements.
        process_set: some of the ranks, as a process set of Horovod's; others apply their own gradients.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.
        exchange: the replicas; the current session's ranks if None, when gradients are applied.

    Raises:
        ConfigError: options that exclude one another, or an optimizer with `gradient_accumulation_steps`.

    Example::

        optimizer = hvdtrain.DistributedOptimizer(keras.optimizers.Adam(1e-3), clip_norm=1.0)
        with tf.GradientTape() as tape:  # a plain tape: the optimizer exchanges
            value = loss(y, model(x, training=True))
        optimizer.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)
    """

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        op: Op = "average",
        compression: CompressionName | Any = "none",
        groups: int = 0,
        sparse_as_dense: bool | None = None,
        gradient_predivide_factor: float = 1.0,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
        exchange: Collectives | None = None,
        name: str = "distributed",
    ) -> None:
        refuse_exchange_of_microbatches(inner_optimizer, "DistributedOptimizer")
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.local_weight: Any = None
        """Weight of this replica's gradients, such as its number of samples, a scalar tensor; None: all are equal."""
        self.role = "gradient"
        """Prefix of the names on the wire; distinguishes exchanges of the same step."""
        self.norm: tf.Tensor | None = None
        """Norm of the reduced gradient that was applied last, before clipping."""
        # By name, so that a saved model needs nothing of Horovod's.
        self._arguments: dict[str, Any] = {
            "op": op_of_updates(op),
            "compression": wire_name(compression),
            "groups": groups,
            "sparse_as_dense": sparse_as_dense,
            "gradient_predivide_factor": gradient_predivide_factor,
            "scale_local_gradients": scale_local_gradients,
        }
        self._exchange = GradientExchange(process_set=process_set, collectives=exchange, **self._arguments)
        self._clipping = Clipping(clip_norm, clip_value)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradient of `var` on its rank."""
        self._exchange.keep_local([var])

    def build(self, variables: Sequence[Any]) -> None:
        """Create the inner optimizer's variables."""
        # Keras' LossScaleOptimizer would make its scale anew.
        if not self.inner_optimizer.built:
            self.inner_optimizer.build(variables)
        super().build(variables)

    @property
    def variables(self) -> list[Any]:
        """The inner optimizer's variables."""
        return list(self.inner_optimizer.variables)

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Exchange `grads` and let the inner optimizer apply the result; every replica must call it."""
        known = trained_variables(innermost(self.inner_optimizer))
        variables = list(known if trainable_variables is None else trainable_variables)
        if not self.built:
            with eager_variables():
                self.build(variables)
        self.apply_reduced(
            self._exchange.reduce(list(grads), variables, role=self.role, weight=self.local_weight), variables
        )

    def apply_reduced(self, reduced: Sequence[Any], variables: Sequence[Any]) -> None:
        """Let the inner optimizer apply gradients that are reduced already."""
        scale, norm = loss_scale_of(self.inner_optimizer), global_norm(reduced)
        self.norm = norm / tf.cast(scale, norm.dtype)
        with fused_updates(self.inner_optimizer):
            self.inner_optimizer.apply(self._clipping.apply(list(reduced), norm, scale), variables)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The inner optimizer's count of updates."""
        return self.inner_optimizer.iterations

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the inner optimizer wants it."""
        return self.inner_optimizer.scale_loss(loss)

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer put in the averaged weights."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor that a saved model keeps; the exchange is the session's."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            **self._arguments,
            "clip_norm": self._clipping.norm,
            "clip_value": self._clipping.value,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "DistributedOptimizer":
        """Make one from its configuration."""
        inner = keras.saving.deserialize_keras_object(config.pop("inner_optimizer"), custom_objects=custom_objects)
        return cls(inner, **config)


def refuse_exchange_of_microbatches(optimizer: Any, within: str) -> None:
    """Refuse an optimizer that would exchange gradients, or gather microbatches, where `within` does both.

    Raises:
        ConfigError: a DistributedOptimizer, or one with Keras' `gradient_accumulation_steps`.
    """
    while optimizer is not None:
        if isinstance(optimizer, DistributedOptimizer):
            raise ConfigError(
                f"{within} exchanges gradients, and DistributedOptimizer would do it again: pass its inner optimizer."
            )
        if optimizer.gradient_accumulation_steps:
            raise ConfigError(
                "Keras' gradient_accumulation_steps would exchange the gradients of every microbatch: use "
                f"{opt('accumulate', 'K')} or hvdtrain.GradientAccumulator, which exchange once for K microbatches."
            )
        optimizer = getattr(optimizer, "inner_optimizer", None)
