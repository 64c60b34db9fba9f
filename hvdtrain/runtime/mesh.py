"""Where each rank stands on the axes of the job: pure NumPy, testable without Horovod."""

from dataclasses import dataclass
from math import prod

import numpy as np

from hvdtrain.config.errors import LaunchError


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks in row-major order; today it has one axis, `dp` (data parallel)."""

    axis_names: tuple[str, ...]
    shape: tuple[int, ...]
    rank: int

    def __post_init__(self) -> None:
        if len(self.axis_names) != len(self.shape):
            raise LaunchError(f"A mesh needs one size for each axis. Received: {self.axis_names}, {self.shape}.")
        if not 0 <= self.rank < prod(self.shape):
            raise LaunchError(f"Rank {self.rank} lies outside a mesh of {prod(self.shape)} ranks.")

    @classmethod
    def data_parallel(cls, rank: int, size: int) -> "Mesh":
        """The mesh in which every rank is a replica of the whole model."""
        return cls(("dp",), (size,), rank)

    def _position(self, axis: str) -> int:
        if axis not in self.axis_names:
            raise LaunchError(f"The mesh has no axis {axis!r}. Available: {', '.join(self.axis_names)}.")
        return self.axis_names.index(axis)

    def size(self, axis: str) -> int:
        """Number of ranks along `axis`."""
        return self.shape[self._position(axis)]

    def coordinate(self, axis: str) -> int:
        """This rank's index along `axis`."""
        return int(np.unravel_index(self.rank, self.shape)[self._position(axis)])

    def ranks_along(self, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one along `axis` only, in the order of that axis."""
        grid = np.arange(prod(self.shape)).reshape(self.shape)
        index: list[int | slice] = [int(c) for c in np.unravel_index(self.rank, self.shape)]
        index[self._position(axis)] = slice(None)
        return tuple(int(rank) for rank in grid[tuple(index)])
