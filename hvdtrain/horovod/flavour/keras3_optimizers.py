"""Optimizers of Keras 3: applying gradients, their state, wrapping, and the methods that those of Keras 2 had."""

import warnings
from collections.abc import Sequence
from typing import Any

import h5py
import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras_variables import load_optimizer_weights, momentum_slots, trained_variables
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.horovod.distribution import CallableList, HorovodNames
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.fused import fused_updates
from hvdtrain.state.variables import as_written, unwrap

KINDS = (keras.optimizers.Optimizer,)
"""Base classes of optimizers."""


_CONSTANTS = {
    *("momentum", "nesterov", "beta_1", "beta_2", "epsilon", "rho", "centered", "amsgrad", "weight_decay"),
    *("clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency"),
}
"""Hyperparameters that Keras 2 reads in every step, and Keras 3 when it compiles one."""


class Refused:
    """An attribute of Keras 2 that Keras 3 has no counterpart for: reading and assigning it raise.

    Args:
        advice: what to use instead.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, optimizer: Any, kind: type | None = None) -> Any:
        if optimizer is None:
            return self
        raise AttributeError(f"Optimizers of Keras 3 have no {self._name}. {self._advice}")

    def __set__(self, optimizer: Any, value: Any) -> None:
        self.__get__(optimizer)


class Keras2Names:
    """Mixin of an optimizer of Keras 3: the attributes and methods that optimizers of Keras 2 had."""

    learning_rate: Any
    variables: Any
    apply_gradients: Any
    is_compiled = False
    """Whether a compiled step applies this optimizer."""

    def __setattr__(self, name: str, value: Any) -> None:
        """Assign an attribute, and warn if a compiled step has taken its former value for a constant."""
        if self.is_compiled and name in _CONSTANTS and getattr(self, name, None) != value:
            warnings.warn(
                f"{type(self).__name__}.{name} is a constant of the step that is compiled already: compile the model "
                f"again, or make a new tf.function, for {name}={value!r} to have an effect.",
                stacklevel=2,
            )
        super().__setattr__(name, value)

    @property
    def lr(self) -> Any:
        """The learning rate: a tf.Variable, which also K.set_value takes; with a schedule its current value."""
        rate = self.learning_rate
        return unwrap(rate) if hasattr(rate, "assign") else rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value

    @property
    def iterations(self) -> Any:
        """The number of steps."""
        return super().iterations  # type: ignore[misc]

    @iterations.setter
    def iterations(self, value: Any) -> None:
        self.iterations.assign(value)

    @property
    def weights(self) -> CallableList:
        """The optimizer's variables."""
        return CallableList(self.variables)

    def get_weights(self) -> list[np.ndarray]:
        """Return the values of `variables`."""
        return [np.asarray(variable) for variable in self.variables]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Assign `weights`, in the order of `variables`; the optimizer must be built.

        Raises:
            ConfigError: they are more or fewer than the variables, or of other shapes.
        """
        own = list(self.variables)
        shapes = [tuple(np.shape(weight)) for weight in weights]
        if shapes != [tuple(variable.shape) for variable in own]:
            raise ConfigError(
                f"set_weights needs one array for each of the optimizer's {len(own)} variables, of the same shape. "
                f"Received: {len(shapes)} arrays. Call optimizer.build(model.trainable_variables) first, and take them "
                "from get_weights of an optimizer of Keras 3."
            )
        for variable, weight in zip(own, weights, strict=True):
            variable.assign(weight)

    @as_written
    def minimize(
        self, loss: Any, var_list: Any, grad_loss: Any = None, name: str | None = None, tape: Any = None
    ) -> Any:
        """Compute the gradients of `loss`, a function, or a value that `tape` recorded; reduce and apply them."""
        gradients, variables = self._local_gradients(loss, var_list, grad_loss, tape)
        self.apply(gradients, variables)  # type: ignore[attr-defined]
        return self.iterations

    def _local_gradients(self, loss: Any, var_list: Any, grad_loss: Any, tape: Any) -> tuple[Any, list[Any]]:
        """Return this rank's gradients of the scaled loss, and the variables."""
        if isinstance(grad_loss, tf.GradientTape):  # Keras 2.11 dropped the argument before
            grad_loss, tape = None, grad_loss
        if not callable(loss) and tape is None:
            raise ConfigError("`tape` is required when a Tensor loss is passed.")
        tape = tf.GradientTape() if tape is None else tape
        with tape:
            value = loss() if callable(loss) else loss
            scaled = self.scale_loss(value)  # type: ignore[attr-defined]
        variables = tf.nest.flatten(var_list() if callable(var_list) else var_list)
        return tape.gradient(scaled, variables, grad_loss), variables

    def _decayed_lr(self, var_dtype: Any = tf.float32) -> tf.Tensor:
        """Return the current learning rate."""
        return tf.cast(tf.convert_to_tensor(self.learning_rate), var_dtype)

    def _create_all_weights(self, var_list: Sequence[Any]) -> None:
        """Create the slots for `var_list`."""
        if not self.built:  # type: ignore[attr-defined]
            self.build(list(var_list))  # type: ignore[attr-defined]

    def _get_hyper(self, name: str, dtype: Any = None) -> Any:
        """Return a hyperparameter."""
        value = getattr(self if name in ("lr", "learning_rate") else innermost(self), name)
        return value if dtype is None else tf.cast(tf.convert_to_tensor(value), dtype)

    def _set_hyper(self, name: str, value: Any) -> None:
        """Assign a hyperparameter."""
        self._get_hyper(name)
        setattr(self if name in ("lr", "learning_rate") else innermost(self), name, value)

    # Not get_slot_names: tf.train.Checkpoint calls it on whatever lists that name in its dir().
    decay = Refused("Pass a schedule, such as keras.optimizers.schedules.InverseTimeDecay, as learning_rate.")
    jit_compile = Refused("It is an argument of model.compile: pass jit_compile=False there.")
    add_weight = Refused("Use add_variable or add_variable_from_reference in build.")
    add_slot = Refused("Use add_variable_from_reference in build.")
    get_slot = Refused("Its slots are in optimizer.variables, named after the variable and the slot.")
    get_updates = Refused("Use apply_gradients, or minimize, in a tf.function.")
    gradient_aggregator = Refused("DistributedOptimizer reduces gradients: leave it out.")
    gradient_transformers = Refused("Change the gradients before apply_gradients, or use clipnorm and clipvalue.")
    loss_scale = Refused("A LossScaleOptimizer has its scale in dynamic_scale.")
    get_unscaled_gradients = Refused("LossScaleOptimizer unscales in apply_gradients: pass it scaled gradients.")

    def get_scaled_loss(self, loss: Any) -> Any:
        """Return `loss` times the loss scale; Keras 3 calls it scale_loss."""
        return self.scale_loss(loss)  # type: ignore[attr-defined]


def add_names(kind: Any) -> None:
    """Give a class of Keras 3's optimizers the names of Keras 2 that it does not have, and `variables()`.

    And its `set_weights`: that of a LossScaleOptimizer assigns the first of `get_weights` to its own variables, and
    ignores the others.
    """
    for name, value in vars(Keras2Names).items():
        if not name.startswith("__") and (name not in dir(kind) or name == "set_weights"):
            setattr(kind, name, value)
    listed = kind.variables.fget
    kind.variables = property(lambda optimizer: CallableList(listed(optimizer)), doc=kind.variables.__doc__)


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
        self.distribution.step(gradients, variables, lambda reduced: plain(reduced, variables))

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
        with eager_variables():
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

        inner.distribution.step(gradients, variables, apply_reduced)

    apply.reduces_first = True  # type: ignore[attr-defined]
    kind.apply = apply
    add_names(kind)
