"""Optimizers of Keras 3: applying gradients, their state, and wrapping."""

import warnings
from collections.abc import Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras_variables import load_optimizer_weights, momentum_slots, step_counter, trained_variables
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.horovod.distribution import CallableList
from hvdtrain.horovod.flavour.horovod_names import HorovodNames
from hvdtrain.horovod.flavour.keras2_names import Keras2Names, add_names
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.fused import fused_updates
from hvdtrain.state.variables import as_written

KINDS = (keras.optimizers.Optimizer,)
"""Base classes of optimizers."""


class Distributed(Keras2Names, HorovodNames):
    """Mixin before a Keras optimizer's class: `apply` reduces first."""

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce `grads` and let the wrapped optimizer apply the result; every rank must call it."""
        gradients, written_out = list(grads), super().apply  # type: ignore[misc]
        self.is_compiled = self.is_compiled or not tf.executing_eagerly()

        def plain(gradients: Sequence[Any], variables: Sequence[Any] | None) -> None:
            with fused_updates(self):
                written_out(gradients, variables)

        if self.distribution.is_done or not gradients:
            plain(gradients, trainable_variables)
            return
        variables = built(self, trainable_variables)
        counter = step_counter(innermost(self))
        self.distribution.step(gradients, variables, counter, lambda reduced: plain(reduced, variables))

    @as_written
    def apply_gradients(self, grads_and_vars: Any, name: str | None = None, **kwargs: Any) -> Any:
        """Reduce and apply pairs of gradients and variables; those of `compute_gradients` are reduced already.

        As are those with Keras 2's `skip_gradients_aggregation=True` or `experimental_aggregate_gradients=False`.
        """
        pairs = list(grads_and_vars)
        is_reduced = kwargs.pop("skip_gradients_aggregation", False)
        is_reduced = not kwargs.pop("experimental_aggregate_gradients", True) or is_reduced
        is_reduced = is_reduced or self.distribution.is_done
        is_reduced = is_reduced or self.distribution.has_reduced([pair[0] for pair in pairs])
        if not is_reduced or self.distribution.passes > 1:
            return super().apply_gradients(pairs, **kwargs)
        with self.distribution.done():
            return super().apply_gradients(pairs, **kwargs)

    @property
    def variables(self) -> CallableList:
        """The wrapped optimizer's variables."""
        return CallableList(super().variables)


def twin_of(optimizer: Any, kind: type) -> Any:
    """Return an optimizer of the class `kind` with the configuration and the state of `optimizer`."""
    twin = kind.from_config(optimizer.get_config())  # type: ignore[attr-defined]
    if optimizer.built:
        with tf.init_scope():
            twin.build(trained_variables(optimizer))
        for mine, theirs in zip(twin.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    return twin


def completed(optimizer: Any, variables: Sequence[Any], path: Any) -> Any:
    """Return the optimizer of a loaded model with the slots for its `variables`, and their saved values.

    Keras saves the state of an optimizer to HDF5 files, but loads it into one that it has built for no variables, which
    cannot train.
    """
    if not h5py.is_hdf5(path):
        return optimizer
    whole = type(optimizer).from_config(optimizer.get_config())
    whole.build(list(variables))
    with h5py.File(path) as file:
        saved = load_optimizer_weights(file) if "optimizer_weights" in file else []
        values = [np.array(value) for value in saved]
    if [value.shape for value in values] == [variable.shape for variable in whole.variables]:
        for variable, value in zip(whole.variables, values, strict=True):
            variable.assign(value)
    elif values:
        text = f"load_model: {path} holds the state of another optimizer; {type(whole).__name__} begins anew."
        warnings.warn(text, stacklevel=3)
    return whole


def built(optimizer: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Create the slots of `optimizer`, which is impossible inside a branch of a graph, and return its variables."""
    if variables is None:
        return trained_variables(optimizer)
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(list(variables))
    return list(variables)


def state_of(optimizer: Any) -> list[Any]:
    """Return the variables of a built optimizer."""
    return list(optimizer.variables)


def velocities_of(optimizer: Any) -> list[Any] | None:
    """Return the velocities of an optimizer with momentum, as far as they exist; None if it has no known ones."""
    return momentum_slots(optimizer) if optimizer.built else []


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

        inner.distribution.step(gradients, variables, step_counter(innermost(inner)), apply_reduced)

    apply.reduces_first = True  # type: ignore[attr-defined]
    kind.apply = apply
    add_names(kind)
