"""Compiled calls outside of the training step, and names within a compiled one."""

from collections.abc import Callable

import tensorflow as tf

_NAMES = "hvdtrain/names"


def run_once(body: Callable[[], None]) -> None:
    """Trace `body` and run it as one graph, in which collectives match by name and not by order.

    A new graph for each call is meant here, so TensorFlow's warning about retracing is passed by.
    """
    tf.function(body, autograph=False).get_concrete_function()()


def numbered(name: str) -> str:
    """Return `name`, with a number from its second use in the function that is being compiled.

    A layer may be called twice, and layers of nested models may share a path; two messages under way must not share a
    name. What a function's body uses counts with the function itself.
    """
    if tf.executing_eagerly():
        return name
    graph = tf.compat.v1.get_default_graph()
    while (outer := getattr(graph, "outer_graph", None)) is not None and outer.building_function:
        graph = outer
    used = graph.get_collection_ref(_NAMES)
    used.append(name)
    return name if used.count(name) == 1 else f"{name}#{used.count(name)}"
