"""The order of compiled functions that exchange, where a script calls several of them within one.

A function's collectives have names of their own in it, and the same names in all of its traces, so that a rank may
trace it anew. Two functions may share names, and so may two calls of one, or two iterations of a loop; TensorFlow runs
these side by side where neither needs the other's results, in an order of its own on each rank. Gradients of one would
be added to those of the other.

TensorFlow runs ops, calls and iterations that write one variable in the order of the script. So each function that
exchanges writes one, once, when all its collectives are done:

    a function          collectives -> write                        they run side by side
    a call in between   collectives -> write -> call -> read -> collectives -> write
    a branch            reads instead: branches of one function share no names
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import add_control_inputs, bare_variable, is_branch, writes_resource
from hvdtrain.runtime.compiled import noted_at, prefixed_function

_TURN = "hvdtrain_turn"
"""Attribute of a process set of Horovod's."""
_PASSAGES = "hvdtrain_passages"
FuncGraph = tf.__internal__.FuncGraph


def turn_of(process_set: Any) -> "Turn | None":
    """Return what orders the functions that exchange among `process_set`; None where nothing is compiled."""
    graph = tf.compat.v1.get_default_graph()
    if tf.executing_eagerly() or not isinstance(graph, FuncGraph):
        return None
    # A graph of TensorFlow 1 orders nothing by itself.
    if not tf.compat.v1.executing_eagerly_outside_functions() or prefixed_function() is not None:
        return None
    if not hasattr(process_set, _TURN):
        setattr(process_set, _TURN, Turn())
    turn: Turn = getattr(process_set, _TURN)
    return turn


@dataclass
class _Passage:
    """What a graph that is being traced has of a turn."""

    turn: "Turn"
    seen: set[str] = field(default_factory=set)
    """Names of the ops that use the variable, as far as they are known."""
    own: set[str] = field(default_factory=set)
    """Names of the ops that were made to take the turn."""
    begin: Any = None
    """The read after the last call that exchanges; None if there was none."""
    end: Any = None
    """The op that waits for the collectives since then."""


def ops_of_turns(graph: Any) -> set[str]:
    """Return the names of the ops of a graph that only keep its collectives in their order."""
    return {name for passage in noted_at(graph, _PASSAGES) for name in passage.own}


class Turn:
    """The variable that functions write when they have exchanged among the ranks of one process set."""

    def __init__(self) -> None:
        self._variable = bare_variable(0)

    def before(self) -> Sequence[Any]:
        """Return what a collective at this place of a graph must wait for."""
        passage = self._passage(tf.compat.v1.get_default_graph())
        return [] if passage.begin is None else [passage.begin]

    def after(self, op: Any) -> None:
        """Let the calls that follow wait for a collective of the graph that is being traced."""
        graph = op.graph
        add_control_inputs(self._end(graph), [op])
        while is_branch(graph):  # the function around it must not pass for one that only reads
            graph = graph.outer_graph
            if not is_branch(graph):
                self._end(graph)

    def _passage(self, graph: Any) -> _Passage:
        """Return what `graph` has of this turn, where calls that exchange since the last look divide it in two."""
        passages = noted_at(graph, _PASSAGES)
        passage = next((each for each in passages if each.turn is self), None)
        if passage is None:
            passage = _Passage(self)
            passages.append(passage)
        handle = graph.capture(self._variable.handle)
        others = [op for op in handle.consumers() if op.name not in passage.seen]
        if others:
            passage.seen |= {op.name for op in others}
            passage.end = None
            if any(writes_resource(op, handle) for op in others):
                passage.begin = self._use(graph, passage, write=False)
        return passage

    def _end(self, graph: Any) -> Any:
        passage = self._passage(graph)
        if passage.end is None:
            passage.end = self._use(graph, passage, write=not is_branch(graph))
        return passage.end

    def _use(self, graph: Any, passage: _Passage, *, write: bool) -> Any:
        """Create an op that reads or writes the variable; a read counts where somebody takes its value."""
        with graph.as_default(), tf.device("/cpu:0"), tf.control_dependencies(None):
            handle = graph.capture(self._variable.handle)
            if write:
                value = tf.constant(0)
                op = tf.raw_ops.AssignVariableOp(resource=handle, value=value)
            else:
                value = tf.identity(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.int32))
                op = value.op.inputs[0].op
        passage.seen.add(op.name)
        passage.own |= {each.name for each in (handle.op, value.op, op)}
        return op
