"""Who holds which part of an embedding table: pure arithmetic, the same on every rank."""

from dataclasses import dataclass
from typing import get_args

import numpy as np

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import EmbeddingSharding
from hvdtrain.runtime.placement import Box, even_slice

SHARDINGS = get_args(EmbeddingSharding)


@dataclass(frozen=True)
class Partition:
    """The parts of a table [rows, dim] that `ranks` ranks hold."""

    rows: int
    dim: int
    sharding: EmbeddingSharding
    """`table`: one rank holds all of it; `row`, `column`: each rank a slice of its rows or columns."""
    ranks: int
    owner: int = 0
    """The rank that holds a whole table, modulo their number."""

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise ConfigError(f"A table is sharded by {', '.join(SHARDINGS)}. Received: {self.sharding!r}.")
        if min(self.rows, self.dim) < 1:
            raise ConfigError(f"A table needs positive sizes. Received: rows={self.rows}, dim={self.dim}.")
        if self.sharding == "column" and self.dim % self.ranks:
            raise ConfigError(
                "A table sharded by column needs a number of columns that the ranks along ep divide. "
                f"Received: {self.dim} columns, {self.ranks} ranks. Choose another dim, or shard by row or table."
            )

    def box(self, rank: int) -> Box:
        """Return the slice of the table that `rank` holds; it may be empty."""
        rows, columns = slice(0, self.rows), slice(0, self.dim)
        if self.ranks == 1 or self.sharding == "none":
            return rows, columns
        if self.sharding == "table":
            return (rows if rank == self.owner % self.ranks else slice(0, 0)), columns
        if self.sharding == "row":
            return even_slice(self.rows, self.ranks, rank), columns
        return rows, even_slice(self.dim, self.ranks, rank)

    def first_rows(self) -> np.ndarray:
        """Return the first row that each rank holds, [ranks]; past the end for those behind the last that has any."""
        if self.sharding != "table":
            return np.array([self.box(rank)[0].start for rank in range(self.ranks)])
        return np.array([0 if rank <= self.owner % self.ranks else self.rows for rank in range(self.ranks)])

    def counts(self) -> np.ndarray:
        """Return how many rows each rank holds, [ranks]."""
        return np.array([self.box(rank)[0].stop - self.box(rank)[0].start for rank in range(self.ranks)])
