"""Initial values of Keras variables, drawn as a model is built or whenever a lazily initialized variable is read.

The stages of a pipeline are known only once the model is built. So while a function builds it, variables have a shape
but no memory, and a read re-runs the initializer. Variables of this rank's stages are initialized after the model was
split: at most these and one other are in memory at any time, and their values are the same in every layout.
"""

import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras_variables import (
    VariableState,
    assign_to_tensor,
    declared_dtype,
    hold,
    making_variables,
    set_state,
    state_of,
)
from hvdtrain.layers.slices import UniformSlice
from hvdtrain.state.variables import fill_memory, free_memory, unwrap


def is_deterministic(initializer: Any) -> bool:
    """Return whether an initializer is known to be deterministic and stateless."""
    if isinstance(initializer, UniformSlice):
        return True
    known = isinstance(initializer, keras.initializers.Initializer) and type(initializer).__module__.startswith(
        "keras."
    )
    return known and isinstance(getattr(initializer, "seed", 0), int)


def initial_value(initializer: Any, variable: Any) -> tf.Tensor:
    """Return a Keras variable's initial value, even before it has one."""
    dtype = declared_dtype(variable)
    return tf.cast(initializer(tuple(variable.shape), dtype=dtype), dtype)


def checksum(value: Any) -> int:
    """Return the CRC-32 of the bytes of `value`."""
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)


def build_lazily(build: Callable[[], Any]) -> Any:
    """Build the model with lazily initialized variables: a read re-runs the initializer.

    Assigned variables and those with non-deterministic initializers are materialized.
    """
    made: list[Any] = []
    with making_variables(partial(_create, made)):
        model = build()
    of_model = {id(variable) for variable in model.variables} if isinstance(model, keras.Model) else set()
    materialize(variable for variable in made if id(variable) not in of_model)  # such as those of a compiled loss
    return model


def materialize(variables: Iterable[Any]) -> None:
    """Materialize those of `variables` that have no value yet."""
    for variable in variables:
        state = state_of(variable)
        if isinstance(state, _Uninitialized):
            _fill(variable, initial_value(state.initializer, variable))


def uninitialize(variables: Iterable[Any]) -> None:
    """Turn `variables` into uninitialized, unreadable ones."""
    for variable in variables:
        if isinstance(state_of(variable), _Uninitialized):
            set_state(variable, None)
        hold(variable, None)


def _create(made: list[Any], owner: Any, initializer: Any, create: Callable[..., Any]) -> Any:
    if type(owner) is not keras.Variable or not is_deterministic(initializer) or not tf.executing_eagerly():
        return create()
    # A variable needs a value of its shape and dtype while it is created; zeros are cheapest.
    tensor = create(initial_value=tf.zeros(tuple(owner.shape), declared_dtype(owner)))
    free_memory(tensor)
    set_state(owner, _Uninitialized(initializer))
    made.append(owner)
    return tensor


class _Uninitialized(VariableState):
    """State of a variable without memory that looks initialized to a model's builder."""

    def __init__(self, initializer: Any) -> None:
        self.initializer = initializer

    def read(self, variable: Any) -> Any:
        """Return the initial value; None while tracing, as it may be materialized by then."""
        return initial_value(self.initializer, variable) if tf.executing_eagerly() else None

    def write(self, variable: Any, value: Any) -> None:
        """Materialize with this value."""
        if tf.executing_eagerly():
            _fill(variable, tf.cast(value, declared_dtype(variable)))
            return
        with tf.init_scope():  # whether the traced function will run is unknown
            materialize([variable])
        assign_to_tensor(variable, value)

    def reinitialize(self, variable: Any, initializer: Any) -> None:
        """Draw by another initializer from now on."""
        if is_deterministic(initializer):
            self.initializer = initializer
        else:
            _fill(variable, initial_value(initializer, variable))


def _fill(variable: Any, value: tf.Tensor) -> None:
    """Materialize a variable with this value."""
    fill_memory(unwrap(variable), value)
    set_state(variable, None)
