"""Initial values of Keras' variables, as they are drawn while a function builds a model."""

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.layers.initial_slice import UniformSlice


def keras_variable(initial_value: Any) -> tuple[Any, Any]:
    """Return the Keras variable that asks for a tf.Variable, and its initializer; None for other initial values.

    Keras gives TensorFlow a function of no arguments that calls the initializer with the variable's shape.
    """
    code = getattr(initial_value, "__code__", None)
    if code is None or set(code.co_freevars) != {"initializer", "self"}:
        return None, None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, initial_value.__closure__, strict=True)}
    return (held["self"], held["initializer"]) if isinstance(held["self"], keras.Variable) else (None, None)


def repeats(initializer: Any) -> bool:
    """Whether an initializer is known to draw the same whenever it is called, and to change nothing as it does."""
    if isinstance(initializer, UniformSlice):
        return True
    known = isinstance(initializer, keras.initializers.Initializer) and type(initializer).__module__.startswith(
        "keras."
    )
    return known and isinstance(getattr(initializer, "seed", 0), int)


def drawn(initializer: Any, variable: Any) -> tf.Tensor:
    """Return what `initializer` draws for a Keras variable, which may not have a value yet."""
    return tf.cast(initializer(variable._shape, dtype=variable._dtype), variable._dtype)


def checksum(value: Any) -> int:
    """Return the CRC-32 of the bytes of `value`."""
    return zlib.crc32(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
