"""Variables without values, for a model of which this rank will hold a part.

Where a pipeline is cut is known once all of the model is there. So while a function builds it, a variable has a shape
and no memory, and whoever reads it sees its initial value drawn. The variables of this rank's stages are drawn for good
when the model has been cut: no more than these and one other is in memory at any time, and in every layout their values
are the same.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.state.initial_values import drawn, keras_variable, repeats
from hvdtrain.state.memory import fill_memory, free_memory
from hvdtrain.state.variables import unwrap

_INITIALIZER = "_hvdtrain_drawn_by"


def built_without_values(build: Callable[[], Any]) -> Any:
    """Return the model that `build` returns, with variables that are drawn whenever they are read.

    Those that are assigned to, and those whose initializer may draw something else the next time, have values.
    """
    with tf.variable_creator_scope(_create):
        return build()


def draw_values(variables: Iterable[Any]) -> None:
    """Draw for good those of `variables` that have no value yet."""
    for variable in variables:
        if isinstance(variable, DrawnWhenRead):
            variable.hold(drawn(vars(variable)[_INITIALIZER], variable))


def _create(next_creator: Callable[..., Any], **options: Any) -> Any:
    owner, initializer = keras_variable(options.get("initial_value"))
    if type(owner) is not keras.Variable or not repeats(initializer) or not tf.executing_eagerly():
        return next_creator(**options)
    # A variable needs a value of its shape and dtype for as long as it takes to make it; zeros cost least.
    tensor = next_creator(**{**options, "initial_value": tf.zeros(owner._shape, owner._dtype)})
    free_memory(tensor)
    vars(owner)[_INITIALIZER] = initializer
    owner.__class__ = DrawnWhenRead
    return tensor


class DrawnWhenRead(keras.Variable):
    """A Keras variable without memory, which looks to the builder of a model as if it had its initial value."""

    @property
    def value(self) -> Any:
        """The initial value; of a function that is being traced the variable, which may have its value by then."""
        if not tf.executing_eagerly():
            return super().value
        return self._maybe_autocast(drawn(vars(self)[_INITIALIZER], self))

    def _direct_assign(self, value: Any) -> None:
        self.hold(tf.cast(value, self._dtype))

    def hold(self, value: tf.Tensor) -> None:
        """Be an ordinary variable of this value from here on."""
        fill_memory(unwrap(self), value)
        delattr(self, _INITIALIZER)
        self.__class__ = keras.Variable
