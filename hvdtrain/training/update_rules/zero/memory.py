"""The memory of whole variables, given back while this replica keeps slices of them."""

from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError


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


def out_of_reach(kind: type) -> type:
    """Return a subclass of a class of Keras variables whose instances refuse to be looked at and assigned to."""

    def refuse(variable: Any, *arguments: Any, **named: Any) -> Any:
        raise ConfigError(
            "Before the first step and between two steps --zero=3 keeps slices of the parameters. Received: a look at, "
            f"or an assignment to, all of {variable.path}, as after a training that ended with an error. Call "
            "trainer.consolidate() on every rank before."
        )

    def value(variable: Any) -> Any:
        # What is traced may read it for its shape alone, or where it is gathered.
        return refuse(variable) if tf.executing_eagerly() else kind.value.fget(variable)  # type: ignore[attr-defined]

    members = {"__array__": refuse, "numpy": refuse, "assign": refuse, "value": property(value)}
    return type(kind.__name__, (kind,), members)
