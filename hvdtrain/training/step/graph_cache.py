"""Compiled functions by the kind of batch that they were compiled for."""

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from hvdtrain.compat.tensorflow import release

MOST_GRAPHS = 32
"""Graphs that are kept for batches of one shape each, with what is measured and without."""
PATIENCE = 1000
"""Steps without a use after which a graph may make room for another one …"""
OFTEN = 32
"""… whose batches came so often meanwhile, in as many steps that found no graph."""


class GraphCache:
    """The graphs of the kinds of batches that come most often.

    Data whose shapes keep changing, such as sequences of any length, have more kinds than can be kept: each takes
    seconds to compile and some MB. The first kinds get a graph each. A further one replaces a graph that is no longer
    used, as after a `fit` on other data, once it has come often enough to be worth compiling.
    """

    def __init__(self) -> None:
        self._graphs: dict[Hashable, Callable[..., Any]] = {}
        self._used: dict[Hashable, int] = {}
        """The step that used each graph last."""
        self._steps = 0
        self._missed: Counter[Hashable] = Counter()

    def __len__(self) -> int:
        return len(self._graphs)

    def find(self, kind: Hashable, compiled: Callable[[], Callable[..., Any]]) -> Callable[..., Any] | None:
        """Return the graph for batches of this kind, made by `compiled` if need be; None if they are to get none."""
        self._steps += 1
        if kind not in self._graphs:
            if not self._has_room(kind):
                return None
            self._graphs[kind] = compiled()
        self._used[kind] = self._steps
        return self._graphs[kind]

    def _has_room(self, kind: Hashable) -> bool:
        """Return whether this kind gets a graph; the one that was not used for the longest time may go for it."""
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
    """Return the structure of a nest of tensors with their shapes and dtypes."""
    if isinstance(nest, Mapping):
        return type(nest), tuple((name, kind_of(each)) for name, each in nest.items())
    if isinstance(nest, list | tuple):
        return type(nest), tuple(map(kind_of, nest))
    return type(nest), getattr(nest, "shape", None), getattr(nest, "dtype", None)
