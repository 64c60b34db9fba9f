"""What the layers of a model that hold slices took and gave in one trace of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError

BY_OUTPUT_RULE = " (by its output rule)"
"""Behind the name of a layer of which not the computation is split but the output."""


@dataclass
class LayerCall:
    """One call of a layer that holds slices, within a trace."""

    layer: str
    """The layer's kind and path."""
    begin: int
    """The number of operations in the graph before the call."""
    end: int = 0
    """And behind it."""
    takes: list[tuple[Any, int]] = field(default_factory=list)
    """Tensors that must be sharded along a dim, counted from the last (-1)."""
    gives: list[tuple[Any, int]] = field(default_factory=list)
    """Tensors that are sharded along a dim, counted from the last."""
    blocks: tuple[int, ...] = ()
    """Lengths of the blocks that the sharded dim of what it gives has side by side; none of a plain slice."""
    passes: list[tuple[Any, Any, Callable[[int], int | None]]] = field(default_factory=list)
    """An input, an output, and a function from the dim along which the first may be sharded to that of the second;
    None where it must be whole."""


@dataclass
class FlowRecord:
    """The calls of one trace; nothing is recorded unless `graph` is set."""

    graph: Any = None
    calls: list[LayerCall] = field(default_factory=list)
    _open: LayerCall | None = None

    @contextmanager
    def call(self, layer: str) -> Iterator[LayerCall]:
        """Record the call of a layer; calls of layers inside it are a part of it."""
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        call = LayerCall(layer, _operations(graph))
        if self.graph is None or self._open is not None:
            yield call
            return
        if graph is not self.graph:
            raise ConfigError(
                f"{layer} is split among ranks and is called within a loop, a branch or a tf.function of the model, "
                "where nobody can follow what it gives. Call it outside of these, or leave it whole."
            )
        self._open = call
        try:
            yield call
        finally:
            self._open = None
        call.end = _operations(graph)
        self.calls.append(call)

    @contextmanager
    def of(self, graph: Any) -> Iterator[None]:
        """Record what is called while `graph` is traced."""
        self.graph, self.calls = graph, []
        try:
            yield
        finally:
            self.graph = None


def _operations(graph: Any) -> int:
    return 0 if graph is None else len(graph.get_operations())
