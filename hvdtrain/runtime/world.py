"""One generation of a job: its ranks, their places on the mesh, and the collectives along each axis."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.mesh import Mesh, process_sets_of
from hvdtrain.runtime.reset import forget_meeting
from hvdtrain.runtime.tuning import ALONE

if TYPE_CHECKING:
    from hvdtrain.runtime.collectives import AxisCollectives


@dataclass(frozen=True)
class World:
    """The ranks of one generation of the job.

    Whatever holds a number of ranks (a compiled step, a reducer, a pipeline) is made from a World, and made anew from
    the next one.
    """

    mesh: Mesh
    hosts: tuple[str, ...]
    """Host name of each rank."""
    collectives: "Mapping[str, AxisCollectives]"
    """By axis of the mesh; empty where Horovod does not run."""
    generation: int = 0
    """How many times the job has formed anew."""

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

    def along(self, axis: str) -> "AxisCollectives":
        """Return the collectives among this rank's group along `axis`.

        Raises:
            LaunchError: the mesh has no such axis.
        """
        self.mesh.size(axis)
        return self.collectives[axis]

    def close(self) -> None:
        """Shut Horovod down, where it runs: for all ranks, so that they must have met before."""
        if self.collectives:
            import horovod.tensorflow as hvd

            hvd.shutdown()


def open_world(
    control: ControlChannel,
    environment: Environment,
    hosts: Sequence[str],
    *,
    axes: Mapping[str, int] | None = None,
    generation: int = 0,
    horovod: bool = True,
    timeout: float = RuntimeConfig.start_timeout,
) -> World:
    """Lay out the ranks and, with `horovod`, start it with a process set for each group that needs one.

    Args:
        control: the channel between the ranks of this generation.
        environment: this process's place.
        hosts: host name of each rank.
        axes: sizes of the mesh's axes; `dp` takes what is left.
        generation: the number of worlds before this one, the last of which must be closed. For there to be a next
            one, the link must have been opened as `restartable`.
        horovod: whether Horovod carries the exchange.
        timeout: seconds to wait for the other ranks.

    Raises:
        LaunchError: the axes do not fit the number of ranks, or Horovod is not usable.
    """
    mesh = Mesh.of(axes or {}, environment.rank, environment.size)
    if horovod and generation > 0:
        forget_meeting(control, environment, os.environ, timeout)
    return World(mesh, tuple(hosts), _start_horovod(environment, mesh) if horovod else {}, generation)


def _start_horovod(environment: Environment, mesh: Mesh) -> "dict[str, AxisCollectives]":
    try:
        import horovod.tensorflow as hvd
    except ImportError as error:
        raise LaunchError(
            f"Horovod does not load with the installed TensorFlow ({error}). python -m hvdtrain setup builds it anew; "
            "python -m hvdtrain doctor shows what does not fit."
        ) from error
    if environment.launcher == "none":
        os.environ.update(ALONE)
    sets = {ranks: hvd.ProcessSet(ranks) for ranks in process_sets_of(mesh)}
    hvd.init(process_sets=list(sets.values()))
    if (hvd.rank(), hvd.size()) != (environment.rank, environment.size):
        raise LaunchError(
            f"{environment.launcher} says rank {environment.rank} of {environment.size}, Horovod says rank "
            f"{hvd.rank()} of {hvd.size()}. Horovod was probably built without the controller of this launcher; "
            "python -m hvdtrain doctor shows which it has."
        )
    return _collectives(mesh, {tuple(range(hvd.size())): hvd.global_process_set, **sets})


def _collectives(mesh: Mesh, sets: Mapping[tuple[int, ...], Any]) -> "dict[str, AxisCollectives]":
    """Return the collectives of each axis on the process set of this rank's group; None stands for a rank alone."""
    from hvdtrain.runtime.collectives import AxisCollectives, AxisGroup

    groups = {axis: mesh.ranks_along(axis) for axis in mesh.axis_names}
    return {
        axis: AxisCollectives(AxisGroup(axis, ranks, mesh.coordinate(axis), sets.get(ranks)))
        for axis, ranks in groups.items()
    }
