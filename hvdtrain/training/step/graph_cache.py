"""Compiled functions by the kind of their arguments."""

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from hvdtrain.compat.tensorflow import release

MOST_GRAPHS = 32
"""Bound on cached graphs, one per batch shape, with and without measurement."""
PATIENCE = 1000
"""Steps without use after which a graph may be evicted …"""
OFTEN = 32
"""… by one whose batches missed the cache this often in the meantime."""


class GraphCache:
    """Cache of graphs for the most frequent kinds of batches.

    Data with ever-changing shapes, such as variable-length sequences, have more kinds than can be cached: each takes
    seconds to compile and some MB. The first kinds get a graph each. A further one evicts a graph that is no longer
    used, as after a `fit` on other data, once it has come often enough.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Callable[..., Any]] = {}
        self._used: dict[Hashable, int] = {}
        """Last step that used each graph."""
        self._steps = 0
        self._missed: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        for graph in self._graphs.values():
            release(graph)

    def find(self, kind: Hashable, compiled: Callable[[], Callable[..., Any]]) -> Callable[..., Any] | None:
        """Return the graph of such batches, compiled if necessary; None if uncached."""
        self._steps += 1
        if kind not in self._graphs:
            if not self._has_room(kind):
                return None
            self._graphs[kind] = compiled()
        self._used[kind] = self._steps
        return self._graphs[kind]

    def _has_room(self, kind: Hashable) -> bool:
        """Return whether this kind gets a graph, evicting the least recent if allowed."""
        if len(self._graphs) < MOST_GRAPHS:
            return True
        if self._missed.total() >= PATIENCE:
            self._missed.clear()
        self._missed[kind] += 1
        oldest = min(self._used, key=self._used.__getitem__)
        if self._missed[kind] < OFTEN or self._steps - self._used[oldest] < PATIENCE:
            return False
        release(self._graphs.pop(oldest))
        del self._used[oldest], self._missed[kind]
        return True


def kind_of(nest: Any) -> Hashable:
    """Return the structure of a nest of tensors with shapes and dtypes."""
    if isinstance(nest, Mapping):
        return type(nest), tuple((name, kind_of(each)) for name, each in nest.items())
    if isinstance(nest, list | tuple):
        return type(nest), tuple(map(kind_of, nest))
    return type(nest), getattr(nest, "shape", None), getattr(nest, "dtype", None)
