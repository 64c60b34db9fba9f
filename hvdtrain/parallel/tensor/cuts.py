"""The slice of a variable that each rank holds."""

from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.placement import Ranges, Region, even_slice


@dataclass(frozen=True, init=False)
class FusedHeads:
    """Entry of a layout, for a dim with several blocks side by side: a rank holds its slice of each of them.

    A Dense layer that computes query, key and value of 12 heads at once, one after another, is cut by
    `(None, hvdtrain.FusedHeads(12, 12, 12))`, and by `(None, hvdtrain.FusedHeads(12, 4, 4))` where groups of 3 queries
    share a key and a value. For blocks without heads, such as the two halves of a gated unit, give their numbers of
    features.

    Args:
        heads: of each block, in their order; every head has the same number of features.

    Raises:
        ConfigError: no numbers of heads.
    """

    heads: tuple[int, ...]

    def __init__(self, *heads: int) -> None:
        if not heads or any(not isinstance(number, int) or number < 1 for number in heads):
            raise ConfigError(
                "hvdtrain.FusedHeads takes the number of heads of each block, such as FusedHeads(12, 12, 12) for "
                f"query, key and value. Received: {', '.join(map(repr, heads)) or 'nothing'}."
            )
        object.__setattr__(self, "heads", heads)

    def __repr__(self) -> str:
        return f"FusedHeads({', '.join(map(str, self.heads))})"


@dataclass(frozen=True)
class Cut:
    """The slice of one dim of a variable that a rank holds; of a fused one, its slice of each block."""

    dim: int
    whole: tuple[int, ...]
    """Shape of the whole variable."""
    parts: tuple[tuple[int, int], ...]
    """Start and stop of the slice of each block."""
    fused: FusedHeads | None = None
    """The blocks, if there are several."""

    @property
    def length(self) -> int:
        """The length of what this rank holds of the dim."""
        return sum(self.blocks)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The length of the slice of each block."""
        return tuple(stop - start for start, stop in self.parts)

    @property
    def description(self) -> str:
        """For messages."""
        return f"along dim {self.dim}{f' by {self.fused}' if self.fused else ''}"

    @property
    def start(self) -> int:
        """The first index of the slice."""
        return self.parts[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice."""
        return (*self.whole[: self.dim], self.length, *self.whole[self.dim + 1 :])

    @property
    def region(self) -> Region:
        """What this rank holds of each dim."""
        slices = tuple(slice(*part) for part in self.parts)
        own = slices[0] if len(slices) == 1 else Ranges(slices)
        return tuple(own if dim == self.dim else slice(0, length) for dim, length in enumerate(self.whole))

    def along(self, whole: tuple[int, ...], dim: int) -> "Cut":
        """Return the slice of another variable, of the shape `whole`, whose `dim` is what this one is cut along."""
        return replace(self, dim=dim, whole=whole)

    def slice_of(self, whole: Any) -> tf.Tensor:
        """Return what this rank holds of the values of the whole variable."""
        inner = (slice(None),) * self.dim
        pieces = [whole[(*inner, slice(*part))] for part in self.parts]
        return tf.identity(pieces[0]) if len(pieces) == 1 else tf.concat(pieces, self.dim)


def even_cut(whole: tuple[int, ...], dim: int, index: int, ranks: int) -> Cut:
    """Return the `index`-th of `ranks` slices along `dim`; the first ones may be one longer."""
    own = even_slice(whole[dim], ranks, index)
    return Cut(dim, whole, ((own.start, own.stop),))


def fused_cut(path: str, whole: tuple[int, ...], dim: int, index: int, ranks: int, fused: FusedHeads) -> Cut:
    """Return the slices along `dim` of the heads that rank `index` of `ranks` holds.

    Args:
        path: of the variable.
        whole: its shape.
        dim: that is cut.
        index: the rank's place.
        ranks: their number.
        fused: the blocks.

    Raises:
        ConfigError: heads that do not fit the dim, or that the ranks do not divide.
    """
    heads = sum(fused.heads)
    if whole[dim] % heads:
        raise ConfigError(
            f"{fused} has {heads} heads of one size side by side, and {path!r} the shape {whole}, with {whole[dim]} "
            f"features on dim {dim}, which {heads} does not divide. Give FusedHeads the heads of each block."
        )
    if any(number % ranks for number in fused.heads):
        raise ConfigError(
            f"tp={ranks} does not divide the heads of each block of {path!r}, which are cut by heads. Received: "
            f"{fused}. Choose a tp that divides all of them, or leave the variable whole."
        )
    size, begin, parts = whole[dim] // heads, 0, []
    for number in fused.heads:
        own = even_slice(number, ranks, index)
        parts.append((begin + own.start * size, begin + own.stop * size))
        begin += number * size
    return Cut(dim, whole, tuple(parts), fused)
