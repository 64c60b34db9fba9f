"""Where each rank stands on the axes of the job: pure NumPy, testable without Horovod."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from hvdtrain.config.errors import LaunchError

AXES = ("pp", "dp", "ep", "tp")
"""Pipeline, data, expert and tensor parallel: those that exchange most are last, among neighbouring ranks."""


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks in row-major order, with a name for each axis."""

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
        """Return the mesh in which every rank is a replica of the whole model."""
        return cls(("dp",), (size,), rank)

    @classmethod
    def of(cls, axes: Mapping[str, int], rank: int, size: int) -> "Mesh":
        """Return the mesh of a job of `size` ranks.

        Args:
            axes: sizes of axes by name; without `dp`, that one takes the ranks that are left.
            rank: this rank.
            size: the number of ranks.

        Raises:
            LaunchError: an unknown axis, a size below 1, or sizes whose product is not `size`.
        """
        for axis, length in axes.items():
            if axis not in AXES:
                raise LaunchError(f"There is no axis {axis!r} of a mesh. Available: {', '.join(AXES)}.")
            if length < 1:
                raise LaunchError(f"The {axis} axis must hold at least 1 rank. Received: {length}.")
        taken = prod(axes.values())
        if size % taken or ("dp" in axes and size != taken):
            sizes = " x ".join(f"{axis} {axes[axis]}" for axis in AXES if axis in axes)
            raise LaunchError(
                f"{size} ranks cannot be laid out as {sizes}: start {'' if 'dp' in axes else 'a multiple of '}{taken}."
            )
        sizes_by_axis = {"dp": size // taken, **axes}
        names = tuple(axis for axis in AXES if axis in sizes_by_axis)
        return cls(names, tuple(sizes_by_axis[axis] for axis in names), rank)

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
        return next(group for group in self.groups(axis) if self.rank in group)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ along `axis` only, each in the order of that axis."""
        grid = np.arange(prod(self.shape)).reshape(self.shape)
        lines = np.moveaxis(grid, self._position(axis), -1).reshape(-1, self.size(axis))
        return [tuple(map(int, line)) for line in lines]


def process_sets_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the groups of ranks that need a process set of their own; the same list on every rank.

    Horovod refuses a set twice, and one of all ranks, which is the global one; a rank alone exchanges nothing.
    """
    groups = dict.fromkeys(group for axis in mesh.axis_names for group in mesh.groups(axis))
    return [group for group in groups if 1 < len(group) < prod(mesh.shape)]
