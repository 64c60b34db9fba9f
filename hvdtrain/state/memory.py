"""The memory of whole variables, given back while nobody needs their values."""

from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import unique_id
from hvdtrain.runtime.guarded import kept


def fill_memory(variable: tf.Variable, value: tf.Tensor) -> Any:
    """Let a variable hold `value`, also after `free_memory`; return the operation within a graph."""
    # Its own `assign` compares the shapes, and that of a freed variable is another.
    return _assign(variable, tf.ensure_shape(value, variable.shape))


def free_memory(variable: tf.Variable) -> Any:
    """Give back the memory of a variable, which keeps its shape; return the operation within a graph."""
    # A graph must not see the shape of what it assigns, and neither must Grappler. It takes a variable and what is
    # assigned to it for equal in shape, and the input and the output of PlaceholderWithDefault, too: with zeros that
    # pass through one, all variables that are freed were of one shape, and it dropped a reshape of what was read.
    no_elements = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([1], tf.int32), shape=[None])
    nothing = tf.raw_ops.Fill(dims=no_elements, value=tf.zeros([], variable.dtype))
    return _assign(variable, kept(nothing, unique_id(variable)))


def _assign(variable: tf.Variable, value: tf.Tensor) -> Any:
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)
