"""Tensors between stages of which each rank along `cp` has a slice of the positions."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.context.positions import position_slices
from hvdtrain.parallel.pipeline.graph import Graph, shapes_here, symbols_of


@dataclass(frozen=True)
class SequenceSlices:
    """Which tensors of a model's graph are slices."""

    ranks: int = 1
    dims: Mapping[int, int] = field(default_factory=dict)
    """The dim that is cut, by the id of the symbolic tensor, which stands for the whole."""

    def shape_here(self, symbol: Any, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """Return the shape of a rank's slice of the tensor of `shape` that `symbol` stands for."""
        cut = self.dims.get(id(symbol))
        return tuple(size // self.ranks if dim == cut and size is not None else size for dim, size in enumerate(shape))


def whole_sequences(model: Any) -> AbstractContextManager[None]:
    """Return a context in which the layers of `model` compute all positions, whether it is split along cp or not."""
    slices = position_slices(model)
    return nullcontext() if slices is None else slices.whole()


def sequence_slices(model: Any, graph: Graph) -> SequenceSlices:
    """Return which tensors of the graph of `model` are slices along cp.

    Raises:
        ConfigError: inputs of any length, of which nothing is known before a batch comes.
    """
    slices = position_slices(model)
    if slices is None:
        return SequenceSlices()
    with slices.whole():
        whole = shapes_here(graph)
    dims = {}
    for symbol, mine, theirs in zip(symbols_of(graph), shapes_here(graph), whole, strict=True):
        pairs = enumerate(zip(mine.as_list(), theirs.as_list(), strict=True))
        cut = next((dim for dim, (here, everywhere) in pairs if here != everywhere), None)
        if cut is not None:
            dims[id(symbol)] = cut
    if any(id(output) not in dims for output in graph.outputs):
        raise ConfigError(
            f"Stages along pp exchange slices of sequences along cp={slices.ranks}, whose length must be known. "
            f"Received: inputs of {model.name!r} of any length. Give keras.Input the length."
        )
    return SequenceSlices(slices.ranks, dims)
