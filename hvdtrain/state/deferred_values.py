"""Variables without values, for a model of which this rank will hold a part.

Where a pipeline is cut is known once all of the model is there. So while a function builds it, a variable has a shape
and no memory, and whoever reads it sees its initial value drawn. The variables of this rank's stages are drawn for good
when the model has been cut: no more than these and one other is in memory at any time, and in every layout their values
are the same.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras_variables import LazyVariable, assign_to_tensor, declared_dtype, hold, making_variables
from hvdtrain.state.initial_values import drawn, repeats
from hvdtrain.state.memory import fill_memory, free_memory
from hvdtrain.state.variables import unwrap

_INITIALIZER = "_hvdtrain_drawn_by"


def built_without_values(build: Callable[[], Any]) -> Any:
    """Return the model that `build` returns, with variables that are drawn whenever they are read.

    Those that are assigned to, and those whose initializer may draw something else the next time, have values.
    """
    made: list[Any] = []
    with making_variables(partial(_create, made)):
        model = build()
    of_model = {id(variable) for variable in model.variables} if isinstance(model, keras.Model) else set()
    draw_values(variable for variable in made if id(variable) not in of_model)  # as of a loss that was compiled
    return model


def draw_values(variables: Iterable[Any]) -> None:
    """Draw for good those of `variables` that have no value yet."""
    for variable in variables:
        if isinstance(variable, DrawnWhenRead):
            variable.hold(drawn(vars(variable)[_INITIALIZER], variable))


def forget_values(variables: Iterable[Any]) -> None:
    """Let `variables` be ordinary ones that have never been initialized, and cannot be read."""
    for variable in variables:
        if isinstance(variable, DrawnWhenRead):
            variable.settle()
        hold(variable, None)


def _create(made: list[Any], owner: Any, initializer: Any, create: Callable[..., Any]) -> Any:
    if type(owner) is not keras.Variable or not repeats(initializer) or not tf.executing_eagerly():
        return create()
    # A variable needs a value of its shape and dtype for as long as it takes to make it; zeros cost least.
    tensor = create(initial_value=tf.zeros(tuple(owner.shape), declared_dtype(owner)))
    free_memory(tensor)
    vars(owner)[_INITIALIZER] = initializer
    owner.__class__ = DrawnWhenRead
    made.append(owner)
    return tensor


class DrawnWhenRead(LazyVariable):
    """A Keras variable without memory, which looks to the builder of a model as if it had its initial value."""

    def read(self) -> Any:
        """Return the initial value; in a function that is being traced the variable may have its value by then."""
        return drawn(vars(self)[_INITIALIZER], self) if tf.executing_eagerly() else None

    def write(self, value: Any) -> None:
        """Be an ordinary variable of this value from here on."""
        if tf.executing_eagerly():
            self.hold(tf.cast(value, declared_dtype(self)))
            return
        with tf.init_scope():  # nobody knows whether what is being traced will run
            draw_values([self])
        assign_to_tensor(self, value)

    def draw_by(self, initializer: Any) -> None:
        """Let another initializer draw the initial value."""
        if repeats(initializer):
            setattr(self, _INITIALIZER, initializer)
        else:
            self.hold(drawn(initializer, self))

    def hold(self, value: tf.Tensor) -> None:
        """Be an ordinary variable of this value from here on."""
        fill_memory(unwrap(self), value)
        self.settle()

    def settle(self) -> None:
        """Be an ordinary variable, whatever it holds."""
        delattr(self, _INITIALIZER)
        self.__class__ = keras.Variable
