"""Private names of Keras 2 (tf_keras), for the Horovod-compatible API."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from hvdtrain.compat import unlike, uses_attribute


class BatchNormalizationByMoments(tf_keras.layers.BatchNormalization):
    """Keras 2's batch normalization with overridable moments.

    Assumes `call` obtains them from `_moments`, via `_calculate_mean_and_var`, unless `fused` or `virtual_batch_size`
    is set.
    """

    def moments(
        self, inputs: tf.Tensor, axes: Sequence[int], keep_dims: bool, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance of `inputs` over `axes`."""
        return super()._moments(inputs, axes, keep_dims, mask=mask)

    def build(self, input_shape: Any) -> None:
        """Create the variables.

        Raises CompatibilityError if Keras does not call `_moments`: statistics would be per replica.
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

    Assumes `_compute_gradients` of legacy optimizers.

    Args:
        optimizer: the optimizer or its `super()`.
        loss: a function, or a value recorded by `tape`.
        grad_loss: the gradient of the loss, for `tf_keras.optimizers.legacy` only.
        tape: or None.
    """
    legacy = getattr(optimizer, "_compute_gradients", None)
    pairs = legacy(loss, var_list, grad_loss, tape) if legacy else optimizer.compute_gradients(loss, var_list, tape)
    return list(pairs)


def strategy_of(optimizer: Any) -> Any:
    """Return the tf.distribute strategy an optimizer was created in. Assumes `_distribution_strategy`."""
    return optimizer._distribution_strategy


def create_slots(optimizer: Any, variables: Sequence[Any]) -> None:
    """Create an optimizer's variables. Assumes `_create_all_weights` of legacy optimizers, which lack `build`."""
    build = getattr(optimizer, "build", None) or optimizer._create_all_weights
    build(list(variables))


def momentum_slots(optimizer: Any) -> list[Any] | None:
    """Return an optimizer's existing momentum variables; None if unknown.

    Assumes `_slots` of legacy optimizers; `_built` and `momentums` or `_momentums` of others.
    """
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots]
    if not getattr(optimizer, "_built", False):
        return []
    return getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))


def rates_of(optimizer: Any) -> list[Any]:
    """Return the learning rate, and a legacy optimizer's other hyperparameters.

    Assumes `_hyper` of legacy optimizers, `_learning_rate` of others.
    """
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        return [optimizer._hyper[name] for name in sorted(optimizer._hyper)]
    return [optimizer._learning_rate]


def loss_scale_of(optimizer: Any) -> Any:
    """Return a LossScaleOptimizer's scale variable. Assumes `_loss_scale`."""
    return optimizer._loss_scale.current_loss_scale


def is_within_loss_scale(optimizer: Any) -> bool:
    """Return whether an optimizer is wrapped by a LossScaleOptimizer.

    Assumes `_is_wrapped_by_loss_scale_optimizer`.
    """
    return bool(getattr(optimizer, "_is_wrapped_by_loss_scale_optimizer", False))
