"""How a rank holds a tensor of a step, whose true value is that of one process with the whole batch.

A tensor without a kind is whole: every rank has its true value.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import tensorflow as tf

Per: TypeAlias = int | tf.Tensor
"""How many rows of a tensor belong to one sample."""
Reduction: TypeAlias = Literal["sum", "mean", "max", "min", "product"]


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of this rank's samples, along one dim.

    Where batches were put one behind the other, as real and generated images are, the dim consists of segments, in each
    of which a sample has `per` rows; a rank holds its rows of each segment.
    """

    dim: int = 0
    per: tuple[Per, ...] = (1,)

    def at(self, dim: int) -> "Rows":
        """Return the same rows along another dim."""
        return Rows(dim, self.per)

    def aligned(self, other: "Rows") -> bool:
        """Return whether both consist of like segments, as far as it is known before they run."""
        return len(self.per) == len(other.per) and all(map(_may_equal, self.per, other.per))


@dataclass(frozen=True)
class Part:
    """One of the parts that give the value when they are reduced over the ranks.

    A `mean` is over this rank's rows, and weighs by samples.
    """

    reduction: Reduction = "sum"

    @property
    def is_linear(self) -> bool:
        """Return whether parts may be added, scaled and contracted before they are reduced."""
        return self.reduction in ("sum", "mean")


@dataclass(frozen=True, eq=False)
class Count:
    """A number of rows in the whole batch: its samples times the sum of `per`."""

    per: tuple[Per, ...]


Entry: TypeAlias = "int | Count | None"


@dataclass(frozen=True, eq=False)
class Sizes:
    """An integer tensor [], [k] or [k / width, width] of which entries are known; None: unknown.

    They are numbers, or counts of rows in the whole batch. A `local` one has those of this rank in their place.
    """

    entries: tuple[Entry, ...]
    scalar: bool = False
    width: int = 0
    local: bool = False

    @property
    def counts(self) -> list[int]:
        """Return the indices of entries that count rows."""
        return [index for index, entry in enumerate(self.entries) if isinstance(entry, Count)]


class Opaque:
    """Something that a unit computes of this rank's rows, whose operations are not looked at."""


class Slice:
    """This rank's slice of a weight's gradient, where each rank has another one."""


OPAQUE = Opaque()
SLICE = Slice()
Kind: TypeAlias = "Rows | Part | Sizes | Opaque | Slice | None"


def times(per: Sequence[Per], factor: Per) -> tuple[Per, ...]:
    """Return rows per sample times a factor."""
    return tuple(each if _is_one(factor) else factor if _is_one(each) else each * factor for each in per)


def _is_one(value: Any) -> bool:
    return isinstance(value, int) and value == 1


def _may_equal(one: Per, other: Per) -> bool:
    return not (isinstance(one, int) and isinstance(other, int)) or one == other
