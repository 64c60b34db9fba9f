"""Optimizers of tf_keras (`optimizers` and `optimizers.legacy`); the counterpart of `keras3_optimizers`."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from hvdtrain.compat import tf_keras as compat
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.horovod.distribution import CallableList, Distribution, HorovodNames
from hvdtrain.optim.averaging import innermost
from hvdtrain.state.variables import as_written

_optimizers = tf_keras.optimizers
_LossScaleOptimizer = tf_keras.mixed_precision.LossScaleOptimizer

KINDS = (_optimizers.Optimizer, _optimizers.legacy.Optimizer)
"""Base classes of optimizers."""


class Distributed(HorovodNames):
    """Mixin before an optimizer's class: `apply_gradients` reduces first."""

    @as_written
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce and apply pairs of gradients and variables; every rank must call it.

        Those of `compute_gradients` are reduced already, as are those with `skip_gradients_aggregation=True` or
        `experimental_aggregate_gradients=False`. Returns the count of calls.
        """
        plain = super().apply_gradients  # type: ignore[misc]
        return _reduced_first(
            self, distribution=self.distribution, plain=plain, grads_and_vars=grads_and_vars, args=args, kwargs=kwargs
        )

    @property
    def _is_scaled(self) -> bool:
        return compat.is_within_loss_scale(self)

    def _local_gradients(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> tuple[Any, Any]:
        pairs = compat.compute_gradients(super(HorovodNames, self), loss, var_list, grad_loss, tape)
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    @property
    def variables(self) -> CallableList:
        """The wrapped optimizer's variables."""
        return CallableList(super().variables())  # type: ignore[misc]


def _reduced_first(
    optimizer: Any, distribution: Distribution, plain: Any, grads_and_vars: Any, args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call `plain`, the `apply_gradients` of `optimizer`, with reduced gradients."""
    pairs = list(grads_and_vars)
    gradients, variables = zip(*pairs, strict=True) if pairs else ((), ())
    if not pairs or distribution.is_done:
        return plain(pairs, *args, **kwargs)
    is_said = kwargs.get("skip_gradients_aggregation", False)
    is_said = not kwargs.get("experimental_aggregate_gradients", True) or is_said
    # Computed for several passes, or for a loss scale around this optimizer, they are this rank's still.
    is_reduced = (is_said and isinstance(optimizer, Distributed)) or distribution.has_reduced(gradients)
    if is_reduced and distribution.passes == 1:
        return plain(pairs, *args, **kwargs)
    built(optimizer, variables)

    def apply(reduced: list[Gradient]) -> None:
        with distribution.done():
            plain(list(zip(reduced, variables, strict=True)), *args, **kwargs)

    distribution.step(gradients, variables, apply)
    return optimizer.iterations


def completed(optimizer: Any, variables: Sequence[Any], path: Any) -> Any:
    """Return the optimizer of a loaded model, to which tf_keras has loaded its state as far as it is saved."""
    return optimizer


def built(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Create the slots of `optimizer`, which is impossible inside a branch of a graph, and return `variables`."""
    with eager_variables():
        compat.create_slots(optimizer, variables)
    return list(variables)


def state_of(optimizer: Any) -> list[Any]:
    """Return the variables of a built optimizer, including those that tf_keras does not count among them.

    These are the learning rate, if it is a variable, with a legacy optimizer other hyperparameters (a rank that has
    resumed may have others), and those of a LossScaleOptimizer.
    """
    inner = innermost(optimizer)
    known = {id(variable) for variable in inner.variables()}
    rates = [rate for rate in compat.rates_of(inner) if isinstance(rate, tf.Variable) and id(rate) not in known]
    is_scaled = isinstance(optimizer, _LossScaleOptimizer) and optimizer.dynamic
    scale = [compat.loss_scale_of(optimizer), optimizer.dynamic_counter] if is_scaled else []
    return [*optimizer.variables(), *rates, *scale]


velocities_of = compat.momentum_slots


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
            self,
            distribution=inner.distribution,
            plain=lambda pairs, *a, **k: plain(self, pairs, *a, **k),
            grads_and_vars=grads_and_vars,
            args=args,
            kwargs=kwargs,
        )

    apply_gradients.reduces_first = True  # type: ignore[attr-defined]
    return apply_gradients
