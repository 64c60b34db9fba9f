"""Which kind of code is being run: eager, a tf.function, or a graph that a session will run."""

import tensorflow as tf


def in_session_graph() -> bool:
    """Whether ops are being added to a graph of TensorFlow 1, where nothing runs before a session is asked to."""
    # Branches of a tf.cond, and functions, are graphs of their own: what surrounds them decides.
    return not tf.compat.v1.executing_eagerly_outside_functions()
