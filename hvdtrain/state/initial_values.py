"""Initial values of Keras variables while a function builds a model."""

import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras_variables import declared_dtype
from hvdtrain.layers.slices import UniformSlice


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
