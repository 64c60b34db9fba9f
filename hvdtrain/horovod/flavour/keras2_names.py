"""What scripts for Keras 2 call on an optimizer, for the wrapped optimizers of Keras 3."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.distribution import CallableList
from hvdtrain.optim.averaging import innermost
from hvdtrain.state.variables import as_written, unwrap

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
