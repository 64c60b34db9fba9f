"""Place ranks on the axes of the job, in pure NumPy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.parallel import AXES, DATA_AXES, HOLDER_AXES, REPLICA_AXES, REST, USER_AXES

GROUPS = (("pp",), ("dp",), ("cp",), ("ep",), ("tp",), DATA_AXES, HOLDER_AXES, REPLICA_AXES, USER_AXES, ("ep", "tp"))
"""Axes along which ranks exchange something, alone and together."""


@dataclass(frozen=True)
class Mesh:
    """A grid of ranks in row-major order, with a name for each axis.

    Questions about several axes are about the ranks that differ along any of them. An axis that the mesh does not name
    holds one rank.
    """

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
            axes: sizes of axes by name; -1, or `dp` if it is not named, takes the ranks that are left.

        Raises:
            LaunchError: an unknown axis, a size below 1, or sizes whose product is not `size`.
        """
        for axis, length in axes.items():
            _refuse_unknown(axis)
            if length < 1 and length != REST:
                raise LaunchError(f"The {axis} axis must hold at least 1 rank. Received: {length}.")
        rest = next((axis for axis, length in axes.items() if length == REST), None if "dp" in axes else "dp")
        fixed = {axis: length for axis, length in axes.items() if axis != rest}
        taken = prod(fixed.values())
        if size % taken or (rest is None and size != taken):
            sizes = " x ".join(f"{axis} {fixed[axis]}" for axis in AXES if axis in fixed)
            raise LaunchError(
                f"{size} ranks cannot be laid out as {sizes}: start {'' if rest is None else 'a multiple of '}{taken}."
            )
        sizes_by_axis = {"dp": 1, **fixed, **({} if rest is None else {rest: size // taken})}
        names = tuple(axis for axis in AXES if axis in sizes_by_axis)
        return cls(names, tuple(sizes_by_axis[axis] for axis in names), rank)

    def size(self, *axes: str) -> int:
        """Number of ranks that differ along `axes` only, this one among them."""
        return prod(self.shape[place] for place in self._places(axes))

    def coordinate(self, *axes: str) -> int:
        """This rank's place among those that differ along `axes` only."""
        return self.ranks_along(*axes).index(self.rank)

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from this one along `axes` only, in ascending order."""
        return next(group for group in self.groups(*axes) if self.rank in group)

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ along `axes` only, each in ascending order."""
        import numpy as np  # listing recipes goes without it

        grid = np.arange(prod(self.shape)).reshape(self.shape)
        places = self._places(axes)
        last = range(len(self.shape) - len(places), len(self.shape))
        lines = np.moveaxis(grid, places, last).reshape(-1, self.size(*axes))
        return [tuple(map(int, line)) for line in lines]

    def neighbours(self, axis: str) -> list[tuple[int, ...]]:
        """All pairs of ranks that are next to each other along `axis`, and the first and the last of each line."""
        pairs = []
        for line in self.groups(axis):
            pairs += [*pairwise(line), (line[0], line[-1])] if len(line) > 1 else []
        return list(dict.fromkeys(pairs))

    def named(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return those of `axes` that hold several ranks, in the order of the mesh."""
        wanted = set(axes)
        for axis in wanted:
            _refuse_unknown(axis)
        return tuple(
            axis for axis, size in zip(self.axis_names, self.shape, strict=True) if axis in wanted and size > 1
        )

    def _places(self, axes: Iterable[str]) -> list[int]:
        for axis in axes:
            _refuse_unknown(axis)
        return sorted(self.axis_names.index(axis) for axis in axes if axis in self.axis_names)


def _refuse_unknown(axis: str) -> None:
    if axis not in AXES:
        raise LaunchError(f"There is no axis {axis!r} of a mesh. Available: {', '.join(AXES)}.")


def process_sets_of(mesh: Mesh) -> list[tuple[int, ...]]:
    """Return the groups of ranks that need a process set of their own; the same list on every rank.

    Horovod refuses a set twice, and one of all ranks, which is the global one; a rank alone exchanges nothing.
    """
    groups = [group for axes in GROUPS for group in mesh.groups(*axes)]
    groups += mesh.neighbours("pp")
    return [group for group in dict.fromkeys(groups) if 1 < len(group) < prod(mesh.shape)]
