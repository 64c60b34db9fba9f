"""The place of a process in its job, and what every launcher's file needs to find it out."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from hvdtrain.config.errors import LaunchError

Controller = Literal["gloo", "mpi", "none"]

UNKNOWN = -1
"""Value of ``cross_rank`` and ``cross_size`` where the launcher does not tell them."""

SECRET_VARIABLE = "HVDTRAIN_JOB_SECRET"
"""Environment variable with the job's secret: any text, the same on every rank."""
LAUNCHER_SECRET_VARIABLE = "HOROVOD_JOB_SECRET"
"""Environment variable with a secret that `horovodrun --gloo` draws for each job (its patch `job-secret`)."""
SECRET_FILE_VARIABLE = "HVDTRAIN_JOB_SECRET_FILE"
"""Environment variable with the path of a file that holds it, and which nobody else can read."""
DRAW_SECRET = "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \\n')"
"""Draws one in a shell, without putting it on a command line."""
STARTER_VARIABLE = "HVDTRAIN_STARTED_BY"
"""Environment variable of ranks that met at a store on rank 0: the launcher that started them."""


@dataclass(frozen=True)
class Environment:
    """The place of this process in its job.

    ``rank`` of ``size`` counts over the job, ``local_rank`` of ``local_size`` over this host, ``cross_rank``
    of ``cross_size`` over the hosts that have this local rank. The last two depend on how the ranks lie on
    *all* hosts, which Open MPI and hydra do not tell a rank that shares the job with other hosts: they are
    then ``UNKNOWN`` (-1), and Horovod tells them after its initialisation. They are never guessed.
    """

    launcher: str
    """``horovodrun``, ``mpirun`` (Open MPI), ``mpiexec`` (MPICH, Intel MPI, Cray), ``mpirun_rsh``, ``srun``, ``jsrun``,
    ``kubernetes`` or ``none``."""
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
    elastic: bool = False
    """Whether the launcher forms the job anew when ranks are lost or come: ``horovodrun`` with host discovery."""
    hosts: tuple[str, ...] = ()
    """Names of the job's hosts, that of rank 0 first, where the launcher tells them and keeps no store."""

    @property
    def store_on_rank_0(self) -> bool:
        """Whether the ranks meet at a store on rank 0: the launcher starts processes, and does no more for them."""
        return self.controller == "gloo" and self.launcher != "horovodrun"


class Launcher(Protocol):
    """Recognises the processes that one launcher starts."""

    def detect(self, environ: Mapping[str, str]) -> Environment | None:
        """Return this process's place, or None if this launcher did not start it.

        Raises:
            LaunchError: the launcher's variables are there but incomplete or malformed.
        """


def place(
    *,
    launcher: str,
    controller: Controller,
    world: tuple[int, int],
    local: tuple[int, int],
    job_id: str,
    cross: tuple[int, int] | None = None,
    hostname: str | None = None,
    elastic: bool = False,
    hosts: Sequence[str] = (),
) -> Environment:
    """Check and name (rank, size) over the job, over this host and over the hosts."""
    for what, (rank, size) in {"rank": world, "local rank": local}.items():
        if not 0 <= rank < size:
            raise LaunchError(f"{launcher} gave this process {what} {rank} of {size}, which cannot be.")
    if cross is None:
        one_host = local[1] == world[1]
        cross = (0, 1) if one_host else (UNKNOWN, UNKNOWN)
    return Environment(
        launcher=launcher,
        controller=controller,
        rank=world[0],
        size=world[1],
        local_rank=local[0],
        local_size=local[1],
        cross_rank=cross[0],
        cross_size=cross[1],
        hostname=hostname or socket.gethostname(),
        job_id=job_id,
        elastic=elastic,
        hosts=tuple(hosts),
    )


def number(environ: Mapping[str, str], *names: str) -> int:
    """Return the first of these variables that is set, as a number of at least 0."""
    name = next((name for name in names if name in environ), None)
    if name is None:
        raise LaunchError(f"The launcher did not set {' or '.join(names)}, which tells this process its place.")
    text = environ[name].strip()
    if not (text.isascii() and text.isdigit()):
        raise LaunchError(f"{name} must be a whole number of at least 0. Received: {environ[name]!r}.")
    return int(text)


def has_secret(environ: Mapping[str, str]) -> bool:
    """Tell whether the environment gives the job's secret, or a file that holds it."""
    return bool(environ.get(SECRET_VARIABLE) or environ.get(SECRET_FILE_VARIABLE))
