"""Each rank's shard of a variable."""

from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.placement import Ranges, Region, even_slice


@dataclass(frozen=True, init=False)
class FusedHeads:
    """Layout entry for a dim of several fused blocks: a rank holds its shard of each block.

    A Dense layer that computes query, key and value of 12 heads one after another is sharded by `(None,
    hvdtrain.FusedHeads(12, 12, 12))`; with groups of 3 queries that share a key and a value, by `(None,
    hvdtrain.FusedHeads(12, 4, 4))`. For blocks without heads, such as the halves of a gated unit, give their feature
    counts.

    Args:
        heads: of each block, in order; all heads have the same number of features.

    Raises:
        ConfigError: invalid numbers.
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
    """A rank's shard of one dim of a variable; with fused blocks, its shard of each."""

    dim: int
    whole: tuple[int, ...]
    """Full shape of the variable."""
    parts: tuple[tuple[int, int], ...]
    """Start and stop in each block."""
    fused: FusedHeads | None = None
    """The blocks, if several."""

    @property
    def length(self) -> int:
        """Local length of the sharded dim."""
        return sum(self.blocks)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Local length of each block."""
        return tuple(stop - start for start, stop in self.parts)

    @property
    def description(self) -> str:
        """Text for messages."""
        return f"along dim {self.dim}{f' by {self.fused}' if self.fused else ''}"

    @property
    def start(self) -> int:
        """First index of the shard."""
        return self.parts[0][0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape."""
        return (*self.whole[: self.dim], self.length, *self.whole[self.dim + 1 :])

    @property
    def region(self) -> Region:
        """This rank's index range per dim."""
        slices = tuple(slice(*part) for part in self.parts)
        own = slices[0] if len(slices) == 1 else Ranges(slices)
        return tuple(own if dim == self.dim else slice(0, length) for dim, length in enumerate(self.whole))

    def along(self, whole: tuple[int, ...], dim: int) -> "Cut":
        """Return the same shard of another variable of shape `whole`, along `dim`."""
        return replace(self, dim=dim, whole=whole)

    def slice_of(self, whole: Any) -> tf.Tensor:
        """Return this rank's shard of a full value."""
        inner = (slice(None),) * self.dim
        pieces = [whole[(*inner, slice(*part))] for part in self.parts]
        return tf.identity(pieces[0]) if len(pieces) == 1 else tf.concat(pieces, self.dim)


def even_cut(whole: tuple[int, ...], dim: int, index: int, ranks: int) -> Cut:
    """Return the `index`-th of `ranks` shards along `dim`; the first may be one longer."""
    own = even_slice(whole[dim], ranks, index)
    return Cut(dim, whole, ((own.start, own.stop),))


def fused_cut(path: str, whole: tuple[int, ...], dim: int, index: int, ranks: int, fused: FusedHeads) -> Cut:
    """Return the shard along `dim` with the heads of rank `index` of `ranks`; `whole` is the full shape.

    Raises ConfigError for heads that do not fit the dim, or are not divisible by the ranks.
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
