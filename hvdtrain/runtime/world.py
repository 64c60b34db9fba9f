"""One world of a job: its ranks, their places on the mesh, and the collectives along each axis."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

from hvdtrain.config.errors import LaunchError, LoneRanksError
from hvdtrain.runtime.broken_links import sockets
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.control.mpi import prepare_mpi
from hvdtrain.runtime.elastic import Engine, place_taken, threads
from hvdtrain.runtime.hierarchy import HostGrid, host_grid
from hvdtrain.runtime.horovod_patches import warn_if_unpatched
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.mesh import GROUPS, Mesh, process_sets_of
from hvdtrain.runtime.tracing.trace import TIMELINE
from hvdtrain.runtime.tuning import ALONE

if TYPE_CHECKING:
    from hvdtrain.runtime.collectives import AxisCollectives, HostGroups


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a job, in an elastic one until they change.

    Whatever holds a number of ranks (a compiled step, a reducer, a pipeline) is made from a World, and made anew from
    the next one.
    """

    mesh: Mesh
    hosts: tuple[str, ...]
    """Host name of each rank."""
    collectives: "Mapping[str, AxisCollectives]"
    """By the axes of the mesh that their ranks differ along, joined by dots; empty where Horovod does not run."""
    engine: Engine | None = None
    """Of an elastic job with other ranks."""
    remarks: tuple[str, ...] = ()
    """What the user should know about how tensors travel."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.mesh.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.hosts)

    @property
    def primary(self) -> bool:
        """Whether this rank writes the run's files and speaks to the user."""
        return self.rank == 0

    def along(self, *axes: str) -> "AxisCollectives":
        """Return the collectives among the ranks that differ from this one along `axes` only.

        Raises:
            LaunchError: an unknown axis, or axes along which nothing is exchanged together.
        """
        from hvdtrain.runtime.collectives import AxisCollectives, AxisGroup

        named = self.mesh.named(axes)
        if not named and "dp" not in axes:
            return AxisCollectives(AxisGroup(axis=".".join(axes), ranks=(self.rank,), index=0, process_set=None))
        key = ".".join(named) or "dp"
        if key not in self.collectives:
            raise LaunchError(f"Nothing is exchanged along {key} together. Available: {', '.join(self.collectives)}.")
        return self.collectives[key]

    @property
    def everyone(self) -> "AxisCollectives":
        """The collectives among all ranks."""
        return self.collectives["job"]

    def between(self, axis: str, here: int, there: int) -> "AxisCollectives":
        """Return the collectives of the two ranks at `here` and `there` along `axis`, one of which is this rank.

        Only neighbours along `pp`, and the first and the last, have them.
        """
        line = self.mesh.ranks_along(axis)
        return self.collectives[pair_name(axis, line[here], line[there])]

    def close(self) -> None:
        """Shut Horovod down, where it runs: for all ranks, so that they must have met before."""
        if self.collectives:
            import horovod.tensorflow as hvd

            if TIMELINE in os.environ:
                hvd.stop_timeline()  # its end would be lost
            hvd.shutdown()


def open_world(
    control: ControlChannel,
    environment: Environment,
    hosts: Sequence[str],
    *,
    axes: Mapping[str, int] | None = None,
    horovod: bool = True,
    by_host: bool = False,
    communicator: Any = None,
) -> World:
    """Lay out the ranks and, with `horovod`, start it with a process set for each group that needs one.

    Args:
        hosts: host name of each rank.
        axes: sizes of the mesh's axes; see `Mesh.of`.
        horovod: whether Horovod carries the exchange.
        by_host: make process sets for sums in two levels where there are several hosts and several ranks on one.
        communicator: of mpi4py, of all ranks, where it is not COMM_WORLD.

    Raises:
        LaunchError: the axes do not fit the number of ranks, or Horovod is not usable.
    """
    mesh = Mesh.of(axes or {}, environment.rank, environment.size)
    before = threads(), set(sockets())
    grids = host_grids(mesh, hosts) if by_host else {}
    collectives = _start_horovod(environment, mesh, grids, communicator) if horovod else {}
    stops = environment.elastic and environment.controller == "gloo"  # where a rank is lost
    engine = Engine(*before) if stops and horovod and environment.size > 1 else None
    if engine is not None:
        control.while_waiting = engine.check
    return World(mesh=mesh, hosts=tuple(hosts), collectives=collectives, engine=engine)


Grids: TypeAlias = Mapping[tuple[int, ...], HostGrid]
"""By the ranks of a group along the data parallel axis."""


def host_grids(mesh: Mesh, hosts: Sequence[str]) -> Grids:
    """Return the grid of each data parallel group that has several hosts and several ranks on one."""
    grids = {group: host_grid(group, hosts) for group in mesh.groups("dp")}
    return {group: grid for group, grid in grids.items() if grid is not None}


def _start_horovod(
    environment: Environment, mesh: Mesh, grids: Grids, communicator: Any
) -> "dict[str, AxisCollectives]":
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise LaunchError(
            f"Horovod does not load with the installed TensorFlow ({error}). python -m hvdtrain setup builds it anew; "
            "python -m hvdtrain doctor shows what does not fit."
        ) from error
    warn_if_unpatched()
    if environment.controller == "none":
        os.environ.update(ALONE)
    prepare_mpi(environment)
    groups = [*process_sets_of(mesh), *(group for grid in grids.values() for group in grid.process_sets())]
    sets = {ranks: hvd.ProcessSet(ranks) for ranks in dict.fromkeys(groups)}
    asks = environment.elastic and environment.controller == "gloo"
    with place_taken(os.environ) if asks else nullcontext():
        hvd.init(comm=communicator, process_sets=list(sets.values()))
    refuse_lone_ranks(environment, hvd.rank(), hvd.size())
    return group_collectives(mesh, {tuple(range(hvd.size())): hvd.global_process_set, **sets}, grids)


def refuse_lone_ranks(environment: Environment, rank: int, size: int) -> None:
    """Check that Horovod counts the ranks as the launcher does, once it is initialised.

    Raises:
        LoneRanksError: it counts other ones.
    """
    if (rank, size) == (environment.rank, environment.size):
        return
    counts = f"{environment.size} ranks, and Horovod counts {size}"
    if size == environment.size:
        counts = f"this process as rank {environment.rank}, and Horovod counts it as rank {rank}"
    raise LoneRanksError(
        f"{environment.launcher} started {counts}: Horovod was built without the controller of this launcher, or for "
        "another MPI. Each process would train a model of its own. python -m hvdtrain doctor shows what Horovod has; "
        "python -m hvdtrain setup builds it for the MPI on PATH, and horovodrun --gloo needs none.",
        rank=environment.local_rank,
    )


def group_collectives(mesh: Mesh, sets: Mapping[tuple[int, ...], Any], grids: Grids) -> "dict[str, AxisCollectives]":
    """Return the collectives of each of this rank's groups on its process set; None stands for a rank alone."""
    from hvdtrain.runtime.collectives import AxisCollectives, AxisGroup

    groups = {".".join(mesh.named(axes)) or "dp": mesh.ranks_along(*axes) for axes in GROUPS if mesh.named(axes)}
    groups.setdefault("dp", mesh.ranks_along("dp"))
    groups["job"] = tuple(range(prod(mesh.shape)))
    pairs = [pair for pair in mesh.neighbours("pp") if mesh.rank in pair]
    groups |= {pair_name("pp", *pair): pair for pair in pairs}
    collectives = {}
    for name, ranks in groups.items():
        by_host = host_groups(name, mesh.rank, grids[ranks], sets) if name == "dp" and ranks in grids else None
        group = AxisGroup(
            axis=name, ranks=ranks, index=ranks.index(mesh.rank), process_set=sets.get(ranks), by_host=by_host
        )
        collectives[name] = AxisCollectives(group)
    return collectives


def pair_name(axis: str, one: int, other: int) -> str:
    """Return the name of the collectives of two ranks along `axis`."""
    return f"{axis}.{min(one, other)}-{max(one, other)}"


def host_groups(axis: str, rank: int, grid: HostGrid, sets: Mapping[tuple[int, ...], Any]) -> "HostGroups":
    """Return the groups of `rank`, a rank of the world, for sums in two levels along `axis`."""
    from hvdtrain.runtime.collectives import AxisGroup, HostGroups

    def group(name: str, ranks: tuple[int, ...]) -> AxisGroup:
        return AxisGroup(axis=f"{axis}.{name}", ranks=ranks, index=ranks.index(rank), process_set=sets.get(ranks))

    crossing = grid.crossing_of(rank)
    between = None if crossing is None else group("between", crossing)
    return HostGroups(group("host", grid.host_of(rank)), between, grid.bridges)
