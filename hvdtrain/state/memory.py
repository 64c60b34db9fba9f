"""Free and re-allocate the memory of full variables."""

from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import unique_id
from hvdtrain.runtime.guarded import kept


def fill_memory(variable: tf.Variable, value: tf.Tensor) -> Any:
    """Assign `value`, also after `free_memory`; return the operation within a graph."""
    # `assign` compares shapes, and a freed variable has another one.
    return _assign(variable, tf.ensure_shape(value, variable.shape))


def free_memory(variable: tf.Variable) -> Any:
    """Free a variable's memory, keeping its shape; return the operation within a graph."""
    # The shape of the assigned value must be hidden from the graph and from Grappler, which assumes that a variable
    # and its assigned value have the same shape, and so have input and output of a PlaceholderWithDefault: with zeros
    # through one, all freed variables seemed to have the same shape, and it removed a reshape of a read value.
    no_elements = tf.raw_ops.PlaceholderWithDefault(input=tf.zeros([1], tf.int32), shape=[None])
    nothing = tf.raw_ops.Fill(dims=no_elements, value=tf.zeros([], variable.dtype))
    return _assign(variable, kept(nothing, unique_id(variable)))


def _assign(variable: tf.Variable, value: tf.Tensor) -> Any:
    return tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value, validate_shape=False)
