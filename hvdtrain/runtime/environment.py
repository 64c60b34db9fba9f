"""Who started this process, and which of how many it is: known before TensorFlow, Horovod or MPI loads."""

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from hvdtrain.config.errors import LaunchError

Controller = Literal["gloo", "mpi", "none"]

UNKNOWN = -1
"""Value of ``cross_rank`` and ``cross_size`` where the launcher does not tell them."""


@dataclass(frozen=True)
class Environment:
    """The place of this process in its job.

    ``rank`` of ``size`` counts over the job, ``local_rank`` of ``local_size`` over this host, ``cross_rank``
    of ``cross_size`` over the hosts that have this local rank. The last two depend on how the ranks lie on
    *all* hosts, which Open MPI and hydra do not tell a rank that shares the job with other hosts: they are
    then ``UNKNOWN`` (-1), and Horovod tells them after its initialisation. They are never guessed.
    """

    launcher: str
    """``horovodrun``, ``mpirun`` (Open MPI), ``mpiexec`` (MPICH or Intel MPI), ``srun`` or ``none``."""
    controller: Controller
    """What Horovod and the control channel speak over; ``none`` for a process that is alone."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hostname: str
    job_id: str
    """The same on every rank of a job; not secret, and another job may have it later."""


class Launcher(Protocol):
    """Recognises the processes that one launcher starts."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """Return this process's place, or None if this launcher did not start it.

        Raises:
            LaunchError: the launcher's variables are there but incomplete or malformed.
        """


class HorovodrunGloo:
    """``horovodrun --gloo``, and whoever sets the same variables by hand."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if not {"HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"} <= environ.keys():
            return None
        port = _number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")
        return _environment(
            launcher="horovodrun",
            controller="gloo",
            world=(_number(environ, "HOROVOD_RANK"), _number(environ, "HOROVOD_SIZE")),
            local=(_number(environ, "HOROVOD_LOCAL_RANK"), _number(environ, "HOROVOD_LOCAL_SIZE")),
            cross=(_number(environ, "HOROVOD_CROSS_RANK"), _number(environ, "HOROVOD_CROSS_SIZE")),
            hostname=environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
            job_id=f"{environ['HOROVOD_GLOO_RENDEZVOUS_ADDR']}:{port}",
        )


class OpenMpi:
    """Open MPI 4 and 5: ``mpirun``, or ``horovodrun`` where it uses MPI."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        if "OMPI_COMM_WORLD_RANK" not in environ:
            return None
        return _environment(
            launcher="horovodrun" if self._by_horovodrun(environ) else "mpirun",
            controller="mpi",
            world=(_number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")),
            local=(
                _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK"),
                _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE"),
            ),
            job_id=environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpirun",
        )

    @staticmethod
    def _by_horovodrun(environ: Mapping[str, str]) -> bool:
        """Horovodrun names the network cards to MPI and to NCCL alike; it leaves no plainer mark."""
        cards = environ.get("OMPI_MCA_btl_tcp_if_include")
        return bool(cards) and cards == environ.get("NCCL_SOCKET_IFNAME") and "OMPI_MCA_pml" in environ


class Hydra:
    """MPICH and Intel MPI: ``mpiexec`` or ``mpirun`` by hydra, and process managers that speak its PMI."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`."""
        of_srun = _in_step(environ) and "MPI_LOCALRANKID" not in environ
        if "PMI_RANK" not in environ or of_srun:
            return None
        return _environment(
            launcher="mpiexec",
            controller="mpi",
            world=(_number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")),
            local=(
                _number(environ, "MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
                _number(environ, "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
            ),
            job_id=environ.get("PMI_JOBID") or environ.get("SLURM_JOB_ID") or "mpiexec",
        )


class Srun:
    """Slurm's ``srun``, with one of its MPI plugins."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """See `Launcher.detect`.

        A plain ``python`` in an sbatch or salloc script has SLURM_PROCID too, but no step of its own.
        """
        if not _in_step(environ):
            return None
        size = _number(environ, "SLURM_STEP_NUM_TASKS")
        plugin = bool({"PMIX_RANK", "PMI_RANK"} & environ.keys())
        if size > 1 and not plugin:
            raise LaunchError(
                f"srun started {size} tasks without MPI, so that they cannot find one another. Use: "
                "srun --mpi=pmix … (srun --mpi=list shows what this cluster has). If srun did not start this "
                "process, unset SLURM_STEP_ID, which it has inherited."
            )
        local_rank, nodes = _number(environ, "SLURM_LOCALID"), _tasks_per_node(environ, size)
        node = _number(environ, "SLURM_NODEID") if len(nodes) > 1 else 0
        if node >= len(nodes):
            raise LaunchError(f"SLURM_NODEID must be below {len(nodes)}, the step's nodes. Received: {node}.")
        return _environment(
            launcher="srun",
            controller="mpi" if plugin else "none",
            world=(_number(environ, "SLURM_PROCID"), size),
            local=(local_rank, nodes[node]),
            cross=(sum(n > local_rank for n in nodes[:node]), sum(n > local_rank for n in nodes)),
            job_id=f"{environ.get('SLURM_JOB_ID', 'srun')}.{environ['SLURM_STEP_ID']}",
        )


class Nobody:
    """No launcher: one process that is the whole job."""

    def detect(self, environ: Mapping[str, str]) -> Environment:
        """See `Launcher.detect`; always answers."""
        return _environment(launcher="none", controller="none", world=(0, 1), local=(0, 1), job_id="none")


LAUNCHERS: tuple[Launcher, ...] = (HorovodrunGloo(), OpenMpi(), Hydra(), Srun(), Nobody())
"""Asked in this order: a launcher inside a Slurm step also passes on the variables of that step."""


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return the place of this process in its job.

    Raises:
        LaunchError: a variable of the launcher is missing or malformed (it and its value are named), or srun
            started several tasks without MPI.
    """
    found = (launcher.detect(environ) for launcher in LAUNCHERS)
    return next(place for place in found if place is not None)


def _environment(
    *,
    launcher: str,
    controller: Controller,
    world: tuple[int, int],
    local: tuple[int, int],
    job_id: str,
    cross: tuple[int, int] | None = None,
    hostname: str | None = None,
) -> Environment:
    """Check and name (rank, size) over the job, over this host and over the hosts."""
    for what, (rank, size) in {"rank": world, "local rank": local}.items():
        if not 0 <= rank < size:
            raise LaunchError(f"{launcher} gave this process {what} {rank} of {size}, which cannot be.")
    if cross is None:
        one_host = local[1] == world[1]
        cross = (0, 1) if one_host else (UNKNOWN, UNKNOWN)
    return Environment(launcher, controller, *world, *local, *cross, hostname or socket.gethostname(), job_id)


def _number(environ: Mapping[str, str], *names: str) -> int:
    """Return the first of these variables that is set, as a number of at least 0."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        raise LaunchError(f"The launcher did not set {' or '.join(names)}, which tells this process its place.")
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name} must be a whole number of at least 0. Received: {environ[name]!r}.")
    return int(text)


def _in_step(environ: Mapping[str, str]) -> bool:
    """Tell whether srun started this process as a task of a step.

    Slurm counts its own steps (batch script, salloc's shell, …) down from 2**32: those are scripts.
    """
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return False
    return _number(environ, "SLURM_STEP_ID") < 0xFFFF_FF00


def _tasks_per_node(environ: Mapping[str, str], size: int) -> list[int]:
    """Return the number of the step's tasks on each of its nodes, from Slurm's "2(x3),1"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text = environ.get(name, str(size))
    nodes = list(_expand(text))
    if sum(nodes) != size:
        raise LaunchError(f"{name} must add up to the {size} tasks of the step. Received: {text!r}.")
    return nodes


def _expand(text: str) -> Iterator[int]:
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match:
            yield from [int(match[1])] * int(match[2] or 1)
