"""Optimizers of tf_keras (`optimizers` and `optimizers.legacy`); the counterpart of `keras3_optimizers`."""

import copy
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from hvdtrain.gradients.reduction import Gradient
from hvdtrain.horovod.distribution import CallableList, Distribution, Reduced, innermost
from hvdtrain.state.variables import as_written

_optimizers = tf_keras.optimizers
_LossScaleOptimizer = tf_keras.mixed_precision.LossScaleOptimizer

KINDS = (_optimizers.Optimizer, _optimizers.legacy.Optimizer)
"""Base classes of optimizers."""


class Distributed:
    """Mixin before an optimizer's class: `apply_gradients` reduces first."""

    distribution: Distribution

    @as_written
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce and apply pairs of gradients and variables; every rank must call it.

        Those of `compute_gradients` are reduced already, as are those with `skip_gradients_aggregation=True` or
        `experimental_aggregate_gradients=False`. Returns the count of calls.
        """
        plain = super().apply_gradients  # type: ignore[misc]
        return _reduced_first(self, self.distribution, plain, grads_and_vars, args, kwargs)

    @as_written
    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return (reduced gradient, variable) pairs; `loss` is a function, or a value that `tape` recorded.

        For `apply_gradients`, which does not reduce them again. With backward_passes_per_step, and within a
        LossScaleOptimizer, they are this rank's still, and reduced when they are applied.
        """
        of_newer = getattr(super(), "compute_gradients", None)
        pairs = (of_newer or super()._compute_gradients)(loss, var_list, tape=tape)  # type: ignore[misc]
        if self.distribution.passes > 1 or getattr(self, "_is_wrapped_by_loss_scale_optimizer", False):
            return list(pairs)
        gradients, variables = zip(*pairs, strict=True)
        return Reduced(zip(self.distribution.reduction.reduce(gradients, variables), variables, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self.distribution.reduction.keep_local([var])

    @property
    def variables(self) -> CallableList:
        """The wrapped optimizer's variables."""
        return CallableList(super().variables())  # type: ignore[misc]


def _reduced_first(
    optimizer: Any, distribution: Distribution, plain: Any, grads_and_vars: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call `plain`, the `apply_gradients` of `optimizer`, with reduced gradients."""
    is_reduced = isinstance(grads_and_vars, Reduced) or kwargs.get("skip_gradients_aggregation", False)
    pairs = list(grads_and_vars)
    if is_reduced or not kwargs.get("experimental_aggregate_gradients", True) or not pairs:
        return plain(pairs, *args, **kwargs)
    gradients, variables = zip(*pairs, strict=True)
    built(optimizer, variables)

    def apply(reduced: list[Gradient]) -> None:
        plain(list(zip(reduced, variables, strict=True)), *args, **kwargs)

    distribution.step(gradients, variables, innermost(optimizer).iterations, apply)
    return optimizer.iterations


def twin_of(optimizer: Any, kind: type) -> Any:
    """Return an optimizer of the class `kind` with the configuration and the state of `optimizer`.

    The variables of the slots are unknown here, so slots are copied, not built.
    """
    # The strategy is a singleton, and cannot be copied.
    strategy = innermost(optimizer)._distribution_strategy
    twin: Any = object.__new__(kind)
    vars(twin).update(copy.deepcopy(vars(optimizer), {id(strategy): strategy}))
    return twin


def built(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Create the slots of `optimizer`, which is impossible inside a branch of a graph, and return `variables`."""
    build = getattr(optimizer, "build", None) or optimizer._create_all_weights
    with tf.init_scope():
        build(list(variables))
    return list(variables)


def state_of(optimizer: Any) -> list[Any]:
    """Return the variables of a built optimizer, including those of a LossScaleOptimizer."""
    return [*optimizer.variables(), *_scale_of(optimizer)]


def velocities_of(optimizer: Any) -> list[Any] | None:
    """Return the velocities of an optimizer with momentum, as far as they exist; None if it has no known ones."""
    if isinstance(optimizer, _optimizers.legacy.Optimizer):
        return [slots["momentum"] for slots in optimizer._slots.values() if "momentum" in slots]
    if not getattr(optimizer, "_built", False):
        return []
    return getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))


def names_of(kind: type) -> dict[str, Any]:
    """Return the attributes (export names) with which a subclass of `kind` is saved as `kind`."""
    return {name: value for name, value in vars(kind).items() if name.startswith("_keras_api_names")}


def reduce_before_loss_scaling() -> None:
    """Let a LossScaleOptimizer around a wrapped optimizer look at reduced gradients.

    Keras puts one around the optimizer in `model.compile` with `mixed_float16`. It would decide per rank whether
    gradients are finite, and ranks that skip a step would leave the others waiting in the exchange.
    """
    for kind in _LossScaleOptimizer.__subclasses__():
        plain = kind.apply_gradients
        if not getattr(plain, "reduces_first", False):
            kind.apply_gradients = _reducing_first(plain)


def _reducing_first(plain: Any) -> Any:
    @as_written
    def apply_gradients(self: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed):
            return plain(self, grads_and_vars, *args, **kwargs)
        return _reduced_first(
            self, inner.distribution, lambda pairs, *a, **k: plain(self, pairs, *a, **k), grads_and_vars, args, kwargs
        )

    apply_gradients.reduces_first = True  # type: ignore[attr-defined]
    return apply_gradients


def _scale_of(optimizer: Any) -> list[Any]:
    """Return a LossScaleOptimizer's own variables."""
    if not isinstance(optimizer, _LossScaleOptimizer) or not optimizer.dynamic:
        return []
    return [optimizer._loss_scale.current_loss_scale, optimizer.dynamic_counter]
