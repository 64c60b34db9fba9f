"""Private names of Keras 2 (tf_keras), by what the face of Horovod uses them for."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from hvdtrain.compat import unlike, uses_attribute


class BatchNormalizationByMoments(tf_keras.layers.BatchNormalization):
    """Keras' batch normalization with moments that a subclass computes.

    Assumed: without `fused` or `virtual_batch_size`, `call` asks `_moments` for them, by `_calculate_mean_and_var`.
    """

    def moments(
        self, inputs: tf.Tensor, axes: Sequence[int], keep_dims: bool, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance of `inputs` over `axes`."""
        return super()._moments(inputs, axes, keep_dims, mask=mask)

    def build(self, input_shape: Any) -> None:
        """Create the variables.

        Raises:
            CompatibilityError: Keras does not ask for the moments: they would be those of one replica.
        """
        if not uses_attribute(tf_keras.layers.BatchNormalization, "_moments"):
            raise unlike(
                "tf_keras", BatchNormalizationByMoments, "BatchNormalization asks _moments for mean and variance"
            )
        super().build(input_shape)

    def _moments(
        self, inputs: tf.Tensor, reduction_axes: Sequence[int], keep_dims: bool, mask: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        return self.moments(inputs, reduction_axes, keep_dims, mask)


def compute_gradients(optimizer: Any, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> list[tuple[Any, Any]]:
    """Return this rank's (gradient, variable) pairs.

    Args:
        optimizer: or its `super()`, for what a class further up computes.
        loss: a function, or a value that `tape` has recorded.
        var_list: the variables.
        grad_loss: the gradient of the loss, for optimizers of `tf_keras.optimizers.legacy` alone.
        tape: or None.

    Assumed: `_compute_gradients` of legacy optimizers.
    """
    legacy = getattr(optimizer, "_compute_gradients", None)
    pairs = legacy(loss, var_list, grad_loss, tape) if legacy else optimizer.compute_gradients(loss, var_list, tape)
    return list(pairs)


def strategy_of(optimizer: Any) -> Any:
    """Return the strategy of tf.distribute that an optimizer was made in, which cannot be copied.

    Assumed: `_distribution_strategy`.
    """
    return optimizer._distribution_strategy


def create_slots(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create the variables of an optimizer for `variables`.

    Assumed: `_create_all_weights` of legacy optimizers, which have no `build`.
    """
    build = getattr(optimizer, "build", None) or optimizer._create_all_weights
    build(list(variables))


def momentum_slots(optimizer: Any) -> list[Any] | None:
    """Return the velocities of an optimizer with momentum, as far as they exist; None if it has none that are known.

    Assumed: `_slots` of legacy optimizers; `_built` and `momentums` or `_momentums` of others.
    """
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots]
    if not getattr(optimizer, "_built", False):
        return []
    return getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))


def rates_of(optimizer: Any) -> list[Any]:
    """Return the learning rate, and of a legacy optimizer its other hyperparameters, in the same order on all ranks.

    Assumed: `_hyper` of legacy optimizers, `_learning_rate` of others.
    """
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return [optimizer._hyper[name] for name in sorted(optimizer._hyper)]
    return [optimizer._learning_rate]


def loss_scale_of(optimizer: Any) -> Any:
    """Return the variable with the scale of a LossScaleOptimizer.

    Assumed: `_loss_scale`.
    """
    return optimizer._loss_scale.current_loss_scale


def is_within_loss_scale(optimizer: Any) -> bool:
    """Whether a LossScaleOptimizer is around an optimizer.

    Assumed: `_is_wrapped_by_loss_scale_optimizer`, which a LossScaleOptimizer sets.
    """
    return bool(getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False))
