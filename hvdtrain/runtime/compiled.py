"""Compiled calls outside of the training step, and names within a compiled one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

_NAMES = "hvdtrain_names"
_PREFIX = "hvdtrain_prefix"
FuncGraph = tf.__internal__.FuncGraph


def run_once(body: Callable[[], object]) -> None:
    """Trace `body` and run it as one graph, in which collectives match by name and not by order.

    A new graph for each call is meant here, so TensorFlow's warning about retracing is passed by.
    """
    tf.function(body, autograph=False).get_concrete_function()()


def numbered(name: str) -> str:
    """Return `name`, with a number from its second use in the function that is being compiled.

    A layer may be called twice, and layers of nested models may share a path; two messages under way must not share a
    name. Functions are numbered each by itself, whatever calls them: one that a rank has traced already, and another
    traces anew, has the same names on both. Those of functions that are called together are used one after another
    (`hvdtrain.runtime.turns`).
    """
    if tf.executing_eagerly():
        return name
    prefixed = prefixed_function()
    if prefixed is not None:
        return f"{noted_at(prefixed, _PREFIX)[0]}/{_numbered_in(name, prefixed)}"
    return _numbered_in(name, _functions()[0])


@contextmanager
def names_under(prefix: str) -> Iterator[None]:
    """Let `numbered` name what the function that is being traced uses by itself, under a prefix of its own.

    Its collectives wait for no other function's: its calls must not run at the same time.
    """
    graph = tf.compat.v1.get_default_graph()
    noted_at(graph, _PREFIX).append(prefix)
    try:
        yield
    finally:
        noted_at(graph, _PREFIX).clear()


def prefixed_function() -> Any:
    """Return the graph of the outermost function around this place whose names have a prefix; None if there is none."""
    found, graph = None, tf.compat.v1.get_default_graph()
    while graph is not None:
        found = graph if noted_at(graph, _PREFIX) else found
        outer = getattr(graph, "outer_graph", None)
        graph = outer if outer is not None and outer.building_function else None
    return found


def _numbered_in(name: str, graph: tf.Graph) -> str:
    """Number `name` in one graph."""
    used = noted_at(graph, _NAMES)
    used.append(name)
    count = used.count(name)
    return name if count == 1 else f"{name}#{count}"


def noted_at(graph: tf.Graph, key: str) -> list[Any]:
    """Return a list that is kept with `graph`; a collection would be copied to the graphs within it."""
    if not hasattr(graph, key):
        setattr(graph, key, [])
    notes: list[Any] = getattr(graph, key)
    return notes


def outermost_graph() -> Any:
    """Return the graph that everything is traced for at this place; None where TensorFlow computes at once."""
    return None if tf.executing_eagerly() else _functions()[1]


def _functions() -> tuple[Any, Any]:
    """Return the graphs of the function that is being traced, and of the one that everything is traced for.

    A branch or a loop has a graph of its own, but belongs to the function around it.
    """
    graph = tf.compat.v1.get_default_graph()
    inner = None
    while True:
        if inner is None and type(graph) is FuncGraph:
            inner = graph
        outer = getattr(graph, "outer_graph", None)
        if outer is None or not outer.building_function:
            return inner or graph, graph
        graph = outer
