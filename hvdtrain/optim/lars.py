"""LARS: layer-wise adaptive learning rates, for large batches."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras_variables import OptimizerWithOwnDecay, is_decayed, slot_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.optim.clipping import ordered_sum, sum_of_squares


@keras.saving.register_keras_serializable(package="hvdtrain")
class LARS(OptimizerWithOwnDecay):
    """Momentum SGD with layer-wise learning rates from weight and gradient norms.

    For weights w, gradient g and weight decay b (You et al. 2017, arXiv:1708.03888, algorithm 1)::

        ratio = trust_coefficient x |w| / (|g| + b |w| + epsilon)
        v <- momentum x v + learning_rate x ratio x (g + b w)
        w <- w - v

    or, with Nesterov's momentum, `w <- w - (momentum x v + learning_rate x ratio x (g + b w))`. Where w or g is zero
    the ratio is 1, so that weights which start at zero can leave it. Variables of fewer than two dims (biases,
    normalization parameters) and those excluded from weight decay have ratio 1 and b = 0.

    Args:
        learning_rate: a number or a schedule; usually much larger than SGD's.
        momentum: momentum factor, in [0, 1].
        nesterov: whether to use Nesterov momentum.
        weight_decay: b; part of the ratio, not decoupled.
        trust_coefficient: relative step size of a layer at learning rate 1.
        epsilon: keeps the ratio finite.
        **kwargs: arguments of every Keras optimizer.

    Raises:
        ConfigError: a momentum outside [0, 1].

    Example::

        rate = keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=0.8, warmup_steps=5)
        trainer = hvdtrain.Trainer(model, hvdtrain.LARS(rate, weight_decay=1e-4), loss)
    """

    def __init__(
        self,
        learning_rate: Any = 1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float | None = 0.0,
        trust_coefficient: float = 1e-3,
        epsilon: float = 1e-9,
        **kwargs: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, **kwargs)
        if not 0.0 <= momentum <= 1.0:
            raise ConfigError(f"The momentum of LARS must lie in [0, 1]. Received: {momentum}.")
        self.momentum = momentum
        self.nesterov = nesterov
        self.trust_coefficient = trust_coefficient
        self.epsilon = epsilon

    def build(self, variables: Sequence[Any]) -> None:
        """Create the momentum slots of `variables`."""
        if self.built:
            return
        super().build(variables)
        self._momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update `variable`; sparse gradients are densified, since the norm is over all rows."""
        gradient = tf.cast(tf.convert_to_tensor(gradient), variable.dtype)
        if len(variable.shape) >= 2 and is_decayed(self, variable):
            gradient = self._adapted(gradient, tf.convert_to_tensor(variable))
        movement = tf.cast(learning_rate, variable.dtype) * gradient
        velocity = slot_of(self, self._momentums, variable)
        self.assign(velocity, self.momentum * velocity + movement)
        self.assign_sub(variable, self.momentum * velocity + movement if self.nesterov else velocity)

    def _adapted(self, gradient: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """Return ratio x (g + b w)."""
        decay = self.weight_decay or 0.0
        weights_norm, gradient_norm = (
            tf.cast(tf.sqrt(sum_of_squares(tensor)), tensor.dtype) for tensor in (weights, gradient)
        )
        epsilon = tf.constant(self.epsilon, gradient_norm.dtype)
        ratio = self.trust_coefficient * weights_norm / ordered_sum([gradient_norm, decay * weights_norm, epsilon])
        usable = tf.logical_and(weights_norm > 0, gradient_norm > 0)
        return tf.where(usable, ratio, tf.ones_like(ratio)) * (gradient + decay * weights)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {
            **super().get_config(),
            "momentum": self.momentum,
            "nesterov": self.nesterov,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
        }
