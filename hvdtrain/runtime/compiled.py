"""Compiled calls outside of the training step, and names within a compiled one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import trace_number

_FUNCTIONS = "hvdtrain/functions"
_NAMES = "hvdtrain/names"
_PREFIX = "hvdtrain/prefix"
FuncGraph = tf.__internal__.FuncGraph


def run_once(body: Callable[[], object]) -> None:
    """Trace `body` and run it as one graph, in which collectives match by name and not by order.

    A new graph for each call is meant here, so TensorFlow's warning about retracing is passed by.
    """
    tf.function(body, autograph=False).get_concrete_function()()


def numbered(name: str) -> str:
    """Return `name`, with a number from its second use in the function that is being compiled.

    A layer may be called twice, and layers of nested models may share a path; two messages under way must not share a
    name. What a function's body uses counts with the function itself.

    TensorFlow traces a function again whose first trace created variables. The second trace takes the numbers of the
    first, which never runs: on a rank where the variables exist already, there is only one.
    """
    if tf.executing_eagerly():
        return name
    prefixed = _prefixed_function()
    if prefixed is not None:
        return f"{prefixed.get_collection(_PREFIX)[0]}/{_numbered_in(name, prefixed)}"
    inner, outermost = _functions()
    if not isinstance(outermost, FuncGraph):
        return _numbered_in(name, outermost)
    functions: list[_Function] = outermost.get_collection_ref(_FUNCTIONS)
    own = next((each for each in functions if each.graph is inner), None)
    if own is None:
        own = _Function(inner, *_trace_of(inner))
        own.replaced = own.first_trace(functions)
        functions.append(own)
    number = own.next_number(name, functions)
    return name if number == 1 else f"{name}#{number}"


@contextmanager
def names_under(prefix: str) -> Iterator[None]:
    """Let `numbered` name what the function that is being traced uses by itself, under a prefix of its own.

    A function may be traced once more for other shapes, and at other times on other ranks: its names are the same in
    all of its traces, which must not run at the same time.
    """
    graph = tf.compat.v1.get_default_graph()
    graph.add_to_collection(_PREFIX, prefix)
    try:
        yield
    finally:
        graph.get_collection_ref(_PREFIX).clear()


def _prefixed_function() -> Any:
    """Return the graph of the outermost function around this place whose names have a prefix; None if there is none."""
    found, graph = None, tf.compat.v1.get_default_graph()
    while graph is not None:
        found = graph if graph.get_collection(_PREFIX) else found
        outer = getattr(graph, "outer_graph", None)
        graph = outer if outer is not None and outer.building_function else None
    return found


def _numbered_in(name: str, graph: tf.Graph) -> str:
    """Number `name` in one graph, such as one of TensorFlow 1; savers take collections of strings alone."""
    used = graph.get_collection_ref(_NAMES)
    used.append(name)
    count = used.count(name)
    return name if count == 1 else f"{name}#{count}"


@dataclass
class _Function:
    """The numbers that names have got in one trace of a function."""

    graph: Any
    signature: str
    trace: str
    """Whether it is the first trace, which may create variables, or the second."""
    replaced: "_Function | None" = None
    """The earlier trace of the same function that this one stands for."""
    numbers: list[tuple[str, int]] = field(default_factory=list)

    def next_number(self, name: str, functions: "list[_Function]") -> int:
        earlier = [number for used, number in self.replaced.numbers if used == name] if self.replaced else []
        count = sum(used == name for used, _ in self.numbers)
        everywhere = [number for each in functions for used, number in each.numbers if used == name]
        number = earlier[count] if count < len(earlier) else max(everywhere, default=0) + 1
        self.numbers.append((name, number))
        return number

    def first_trace(self, functions: "list[_Function]") -> "_Function | None":
        """Return the trace that created the variables, if this is the second trace of its function."""
        if self.trace != "second":
            return None
        replaced = [each.replaced for each in functions]
        same = (each for each in reversed(functions) if (each.trace, each.signature) == ("first", self.signature))
        return next((each for each in same if not any(each is one for one in replaced)), None)


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


def _trace_of(graph: tf.Graph) -> tuple[str, str]:
    """Return the name and signature of the function that `graph` is a trace of, and which trace it is."""
    if not isinstance(graph, FuncGraph):  # a graph of TensorFlow 1
        return "", ""
    return f"{graph.name} {graph.structured_input_signature}", trace_number(graph)
