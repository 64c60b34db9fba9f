"""Looking into the graph of a step, its functions included."""

from collections.abc import Iterable
from typing import Any


def draws(graph: Any) -> bool:
    """Return whether random numbers are drawn."""
    return any("Random" in operation for operation in _operations(graph))


def exchanges(graph: Any) -> bool:
    """Return whether something is exchanged with other ranks."""
    return any(operation.startswith("Horovod") for operation in _operations(graph))


def _operations(graph: Any) -> Iterable[str]:
    definition = graph.as_graph_def()
    return {
        node.op for nodes in (definition.node, *(f.node_def for f in definition.library.function)) for node in nodes
    }
