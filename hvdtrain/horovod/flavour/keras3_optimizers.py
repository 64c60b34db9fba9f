"""Optimizers of Keras 3: applying gradients, their state, and wrapping."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.horovod.distribution import CallableList, Distribution, Reduced, innermost
from hvdtrain.optim.fused import fused_updates
from hvdtrain.state.variables import as_written

KINDS = (keras.optimizers.Optimizer,)
"""Base classes of optimizers."""


class Distributed:
    """Mixin before a Keras optimizer's class: `apply` reduces first."""

    distribution: Distribution

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce `grads` and let the wrapped optimizer apply the result; every rank must call it."""
        gradients, written_out = list(grads), super().apply  # type: ignore[misc]

        def plain(gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
            with fused_updates(self):
                written_out(gradients, variables)

        if self.distribution.is_done or not gradients:
            plain(gradients, trainable_variables)
            return
        variables = built(self, trainable_variables)
        counter = innermost(self)._iterations
        self.distribution.step(gradients, variables, counter, lambda reduced: plain(reduced, variables))

    @as_written
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce and apply pairs of gradients and variables; those of `compute_gradients` are reduced already."""
        pairs = grads_and_vars if isinstance(grads_and_vars, Reduced) else list(grads_and_vars)
        if not isinstance(pairs, Reduced):
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
        with self.distribution.done():
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]

    @as_written
    def compute_gradients(self, loss: Any, var_list: Sequence[Any], tape: Any = None) -> list[tuple[Any, Any]]:
        """Return (reduced gradient, variable) pairs; `loss` is a function, or a value that `tape` recorded.

        For `apply_gradients`, which does not reduce them again.
        """
        if self.distribution.passes > 1:
            raise ConfigError("compute_gradients reduces at once: with backward_passes_per_step use apply_gradients.")
        tape = tf.GradientTape() if tape is None else tape
        if callable(loss):
            with tape:
                loss = loss()
        gradients = tape.gradient(loss, list(var_list))
        return Reduced(zip(self.distribution.reduction.reduce(gradients, var_list), var_list, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self.distribution.reduction.keep_local([var])

    @property
    def variables(self) -> CallableList:
        """The wrapped optimizer's variables."""
        return CallableList(super().variables)  # type: ignore[misc]


def twin_of(optimizer: Any, kind: type) -> Any:
    """Return an optimizer of the class `kind` with the configuration and the state of `optimizer`."""
    twin = kind.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    if optimizer.built:
        with tf.init_scope():
            twin.build(optimizer._trainable_variables)
        for mine, theirs in zip(twin.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    return twin


def built(optimizer: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Create the slots of `optimizer`, which is impossible inside a branch of a graph, and return its variables."""
    if variables is None:
        return list(optimizer._trainable_variables)
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(list(variables))
    return list(variables)


def state_of(optimizer: Any) -> list[Any]:
    """Return the variables of a built optimizer."""
    return list(optimizer.variables)


def velocities_of(optimizer: Any) -> list[Any] | None:
    """Return the velocities of an optimizer with momentum, as far as they exist; None if it has no known ones."""
    if not optimizer.built:
        return []
    return getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))


def names_of(kind: type) -> dict[str, Any]:
    """Return the attributes with which a subclass of `kind` is saved as `kind`."""
    return {}


def reduce_before_loss_scaling() -> None:
    """Let a LossScaleOptimizer around a wrapped optimizer look at reduced gradients.

    Keras puts one around the optimizer in `model.compile` with `mixed_float16`. It would decide per rank whether
    gradients are finite, and ranks that skip a step would leave the others waiting in the exchange.
    """
    kind = keras.optimizers.LossScaleOptimizer
    plain = kind.apply
    if getattr(plain, "reduces_first", False):
        return

    @as_written
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        inner = getattr(self, "inner_optimizer", None)
        gradients = list(grads)
        if not isinstance(inner, Distributed) or inner.distribution.is_done or not gradients:
            plain(self, gradients, trainable_variables)
            return
        variables = built(self, trainable_variables)

        def apply_reduced(reduced: list[Gradient]) -> None:
            with inner.distribution.done():
                plain(self, reduced, variables)

        inner.distribution.step(gradients, variables, innermost(inner)._iterations, apply_reduced)

    apply.reduces_first = True  # type: ignore[attr-defined]
    kind.apply = apply
