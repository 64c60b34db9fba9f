"""The memory of whole variables, given back while nobody needs their values."""

from typing import Any

import tensorflow as tf


def fill_memory(variable: tf.Variable, value: tf.Tensor) -> Any:
    """Let a variable hold `value`, also after `free_memory`; return the operation within a graph."""
    # Its own `assign` compares the shapes, and that of a freed variable is another.
    return _assign(variable, tf.ensure_shape(value, variable.shape))


def free_memory(variable: tf.Variable) -> Any:
    """Give back the memory of a variable, which keeps its shape; return the operation within a graph."""
    # A graph must not see the shape of what it assigns.
    nothing = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([0], variable.dtype), shape=tf.TensorShape(None))
    return _assign(variable, nothing)


def _assign(variable: tf.Variable, value: tf.Tensor) -> Any:
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)
