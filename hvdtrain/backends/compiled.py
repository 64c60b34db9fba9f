"""Compiled calls outside of the training step."""

from collections.abc import Callable

import tensorflow as tf


def run_once(body: Callable[[], None]) -> None:
    """Trace `body` and run it as one graph, in which collectives match by name and not by order.

    A new graph for each call is meant here, so TensorFlow's warning about retracing is passed by.
    """
    tf.function(body, autograph=False).get_concrete_function()()
