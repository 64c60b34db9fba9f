"""Detect launcher, rank and size before TensorFlow, Horovod or MPI loads.

A launcher that gives each rank its place in variables of its own is a row of `_BY_VARIABLES`; others have a function.
`_LAUNCHERS` is the order in which they are asked. May import `config` only.
"""

import itertools
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.errors import LaunchError, LoneRanksError
from hvdtrain.runtime.inherited import refuse_ended_launcher

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


PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
"""Fields of an `Environment`; in capitals, what follows HOROVOD_ in the variables of `horovodrun`."""


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
    """Whether the job may go on without ranks that are lost: by ``horovodrun`` with host discovery, which forms it anew
    and admits others, or by ``mpirun --enable-recovery``, which leaves the other ranks alone.
    """
    hosts: tuple[str, ...] = ()
    """Names of the job's hosts, that of rank 0 first, where the launcher tells them and keeps no store."""

    @property
    def store_on_rank_0(self) -> bool:
        """Whether the ranks meet at a store on rank 0: the launcher starts processes, and does no more for them."""
        return self.controller == "gloo" and self.launcher != "horovodrun"


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
    host = hostname or socket.gethostname()
    return Environment(launcher, controller, *world, *local, *cross, host, job_id, elastic, tuple(hosts))


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
    """Return whether the environment gives the job's secret, or a file that holds it."""
    return bool(environ.get(SECRET_VARIABLE) or environ.get(SECRET_FILE_VARIABLE))


@dataclass(frozen=True, kw_only=True)
class _Variables:
    """A launcher over MPI that sets variables of its own: of several names the first one that is set counts."""

    launcher: str
    rank: str
    """Set in all of its processes."""
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    job_id: tuple[str, ...]
    """A job without one has the launcher's name."""
    inside: Callable[[Mapping[str, str]], bool] = lambda environ: True
    """Whether these variables are its own, and not of a launcher that sets the same ones."""
    called: Callable[[Mapping[str, str]], str] | None = None
    """Returns the name of the launcher where several set these variables."""
    goes_on: str = ""
    """Set to 1 where the launcher does not end the other ranks when one is lost."""

    def detect(self, environ: Mapping[str, str]) -> "Environment | None":
        if self.rank not in environ or not self.inside(environ):
            return None
        return place(
            launcher=self.called(environ) if self.called else self.launcher,
            controller="mpi",
            world=(number(environ, self.rank), number(environ, *self.size)),
            local=(number(environ, *self.local_rank), number(environ, *self.local_size)),
            job_id=next((environ[name] for name in self.job_id if environ.get(name)), self.launcher),
            elastic=environ.get(self.goes_on) == "1",
        )


def _open_mpi(environ: Mapping[str, str]) -> str:
    """Return who called mpirun: horovodrun names the network cards to MPI and to NCCL alike."""
    cards = environ.get("OMPI_MCA_btl_tcp_if_include")
    alike = bool(cards) and cards == environ.get("NCCL_SOCKET_IFNAME") and "OMPI_MCA_pml" in environ
    return "horovodrun" if alike else "mpirun"


def _mvapich(environ: Mapping[str, str]) -> str:
    return "mpiexec" if "PMI_RANK" in environ and "MPIRUN_RANK" not in environ else "mpirun_rsh"


_JSRUN = _Variables(  # IBM's Job Step Manager on LSF clusters
    launcher="jsrun",
    rank="JSM_NAMESPACE_RANK",
    size=("JSM_NAMESPACE_SIZE",),
    local_rank=("JSM_NAMESPACE_LOCAL_RANK",),
    local_size=("JSM_NAMESPACE_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    job_id=("PMIX_NAMESPACE", "LSB_JOBID"),
)
_OPEN_MPI = _Variables(  # 4 and 5: mpirun, or horovodrun where it uses MPI
    launcher="mpirun",
    called=_open_mpi,
    rank="OMPI_COMM_WORLD_RANK",
    size=("OMPI_COMM_WORLD_SIZE",),
    local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
    local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
    job_id=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    goes_on="OMPI_MCA_orte_enable_recovery",  # mpirun --enable-recovery
)
_CRAY_PALS = _Variables(  # mpiexec of HPE Cray EX, with PBS or alone; with Slurm srun sets the same variables
    launcher="mpiexec",
    rank="PALS_RANKID",
    size=("PMI_SIZE", "PALS_SIZE"),
    local_rank=("PALS_LOCAL_RANKID",),
    local_size=("PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE"),
    job_id=("PALS_APID",),
    inside=lambda environ: "PALS_LOCAL_RANKID" in environ and not in_step(environ),
)
_MVAPICH = _Variables(  # MVAPICH2's mpirun_rsh, and its mpiexec, which sets PMI's variables besides
    launcher="mpirun_rsh",
    called=_mvapich,
    rank="MV2_COMM_WORLD_RANK",
    size=("MV2_COMM_WORLD_SIZE",),
    local_rank=("MV2_COMM_WORLD_LOCAL_RANK",),
    local_size=("MV2_COMM_WORLD_LOCAL_SIZE",),
    job_id=("MPIRUN_ID", "PMI_JOBID"),
)
_HYDRA = _Variables(  # mpiexec or mpirun of MPICH and Intel MPI, and process managers that speak its PMI
    launcher="mpiexec",
    rank="PMI_RANK",
    size=("PMI_SIZE",),
    local_rank=("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK"),
    local_size=("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"),
    job_id=("PMI_JOBID", "SLURM_JOB_ID"),
    inside=lambda environ: not in_step(environ) or "MPI_LOCALRANKID" in environ,
)


def is_elastic(environ: Mapping[str, str]) -> bool:
    """Return whether ``horovodrun`` discovers hosts, and forms the job anew when ranks are lost or come."""
    return environ.get("HOROVOD_ELASTIC", "0") not in ("", "0")


def _horovodrun_gloo(environ: Mapping[str, str]) -> Environment | None:
    """``horovodrun --gloo``, and whoever sets the same variables: by hand, or `hvdtrain.runtime.rendezvous`."""
    if not {"HOROVOD_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR"} <= environ.keys():
        return None
    port = number(environ, "HOROVOD_GLOO_RENDEZVOUS_PORT")
    # Without the token that a patched Horovod puts behind it.
    address = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"].partition("/")[0].partition(":")[0]
    return place(
        launcher=environ.get(STARTER_VARIABLE, "horovodrun"),
        controller="gloo",
        world=(number(environ, "HOROVOD_RANK"), number(environ, "HOROVOD_SIZE")),
        local=(number(environ, "HOROVOD_LOCAL_RANK"), number(environ, "HOROVOD_LOCAL_SIZE")),
        cross=(number(environ, "HOROVOD_CROSS_RANK"), number(environ, "HOROVOD_CROSS_SIZE")),
        hostname=environ.get("HOROVOD_HOSTNAME") or socket.gethostname(),
        job_id=f"{address}:{port}",
        elastic=is_elastic(environ),
    )


def _srun(environ: Mapping[str, str]) -> Environment | None:
    """Slurm's ``srun``: with one of its MPI plugins or, where the job has a secret, over Gloo.

    A plain ``python`` in an sbatch or salloc script has SLURM_PROCID too, but no step of its own.
    """
    if not in_step(environ):
        return None
    size = number(environ, "SLURM_STEP_NUM_TASKS")
    controller = _controller(environ, size)
    local_rank, nodes = number(environ, "SLURM_LOCALID"), _tasks_per_node(environ, size)
    node = number(environ, "SLURM_NODEID") if len(nodes) > 1 else 0
    if node >= len(nodes):
        raise LaunchError(f"SLURM_NODEID must be below {len(nodes)}, the step's nodes. Received: {node}.")
    rank = number(environ, "SLURM_PROCID")
    if controller == "gloo" and rank == 0 and node != 0:
        raise LaunchError(
            "Rank 0 must run on the first node of the step, where the others look for it. Received: "
            f"SLURM_NODEID={node}. Unset SLURM_DISTRIBUTION and SLURM_HOSTFILE, or use MPI: srun --mpi=pmix …"
        )
    hosts: tuple[str, ...] = ()
    if controller == "gloo":
        given = environ.get("SLURM_STEP_NODELIST", "")
        hosts = tuple(expand_hosts(given))
        if len(hosts) != len(nodes):
            raise LaunchError(f"SLURM_STEP_NODELIST must name the {len(nodes)} nodes of the step. Received: {given!r}.")
    # A job that was requeued keeps its number and that of the step, and counts its starts.
    job_id, restarts = f"{environ.get('SLURM_JOB_ID', 'srun')}.{environ['SLURM_STEP_ID']}", "SLURM_RESTART_COUNT"
    job_id += "" if environ.get(restarts, "0") == "0" else f".{environ[restarts]}"
    return place(
        launcher="srun",
        controller=controller,
        world=(rank, size),
        local=(local_rank, nodes[node]),
        cross=(sum(n > local_rank for n in nodes[:node]), sum(n > local_rank for n in nodes)),
        job_id=job_id,
        hostname=environ.get("SLURMD_NODENAME"),
        hosts=hosts,
    )


def in_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun started this process as a task of a step.

    Slurm counts its own steps (batch script, salloc's shell, …) down from 2**32: those are scripts.
    """
    if not {"SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"} <= environ.keys():
        return False
    return number(environ, "SLURM_STEP_ID") < 0xFFFF_FF00


def _controller(environ: Mapping[str, str], size: int) -> Controller:
    if {"PMIX_RANK", "PMI_RANK"} & environ.keys():
        return "mpi"
    if size == 1 or has_secret(environ):
        return "none" if size == 1 else "gloo"
    raise LoneRanksError(
        f"srun started {size} tasks without MPI, so that they cannot find one another. Use MPI: srun --mpi=pmix … "
        "(srun --mpi=list shows what this cluster has). Or use Gloo, with a secret in the job script, before srun: "
        f"export {SECRET_VARIABLE}={DRAW_SECRET}. "
        "If srun did not start this process, unset SLURM_STEP_ID, which it has inherited.",
        rank=number(environ, "SLURM_PROCID"),
    )


def expand_hosts(text: str) -> Iterator[str]:
    """Return the hosts of one of Slurm's lists, as `scontrol show hostnames` does: "n[1-2,07],gpu" has four."""
    for pattern in re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text):
        pieces = re.split(r"\[([^\]]*)\]", pattern)  # names and, between them, ranges
        choices = [[piece] for piece in pieces]
        for place, ranges in list(enumerate(pieces))[1::2]:
            choices[place] = []
            for each in ranges.split(","):
                first, _, last = each.partition("-")
                if not (first + last).isdecimal():
                    raise LaunchError(
                        f"Slurm's list of hosts must hold numbers between brackets. Received: [{ranges}]."
                    )
                numbers = range(int(first), int(last or first) + 1)
                choices[place] += [str(n).zfill(len(first)) for n in numbers]
        yield from ("".join(choice) for choice in itertools.product(*choices))


def _tasks_per_node(environ: Mapping[str, str], size: int) -> list[int]:
    """Return the number of the step's tasks on each of its nodes, from Slurm's "2(x3),1"."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    text, nodes = environ.get(name, str(size)), []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        nodes += [int(match[1])] * int(match[2] or 1) if match else []
    if sum(nodes) != size:
        raise LaunchError(f"{name} must add up to the {size} tasks of the step. Received: {text!r}.")
    return nodes


INDEX = "JOB_COMPLETION_INDEX"
COMPLETIONS = "JOB_COMPLETIONS"


def _indexed_job(environ: Mapping[str, str]) -> Environment | None:
    """The pods of a Kubernetes Job whose ``completionMode`` is ``Indexed``, each of them a rank.

    Kubernetes tells a pod its index, and not how many there are: the manifest sets JOB_COMPLETIONS.
    """
    if INDEX not in environ:
        return None
    if COMPLETIONS not in environ:
        raise LoneRanksError(
            f"A pod of an Indexed Job must know how many pods there are. Received: {INDEX}={environ[INDEX]}, and "
            f"no {COMPLETIONS}. Set {COMPLETIONS} in the manifest to its `completions`, or to 1 if each pod is to "
            "train a model of its own.",
            rank=number(environ, INDEX),
        )
    index, size = number(environ, INDEX), number(environ, COMPLETIONS)
    if size == 1:
        return None
    if not has_secret(environ):
        raise LoneRanksError(
            f"The {size} pods of an Indexed Job need a secret by which to know one another. Set "
            f"{SECRET_VARIABLE} from a Secret in the manifest, as launch/kubernetes/indexed-job-gloo.yaml does.",
            rank=index,
        )
    pod = environ.get("HOSTNAME") or socket.gethostname()
    job = pod.removesuffix(f"-{index}")  # its name, which those of its pods begin with
    return place(
        launcher="kubernetes",
        controller="gloo",
        world=(index, size),
        local=(0, 1),
        cross=(index, size),
        job_id=job,
        hostname=pod,
        hosts=[f"{job}-{each}" for each in range(size)],
    )


_UNSUPPORTED = (
    ("RANK", "WORLD_SIZE", {"MASTER_ADDR", "TORCHELASTIC_RUN_ID"}, "torchrun or the like"),
    ("FLUX_TASK_RANK", "FLUX_JOB_SIZE", {"FLUX_JOB_SIZE"}, "flux run"),
    ("PMIX_RANK", None, {"PMIX_NAMESPACE"}, "a PMIx launcher such as prun or prterun"),
    ("ALPS_APP_PE", None, {"ALPS_APP_ID"}, "aprun"),
)
"""Launchers that are not supported: variables with rank and size, others of which one is set too, and a name."""


def _unsupported(environ: Mapping[str, str]) -> None:
    """Refuse launchers and operators that do not start Horovod's ranks, or that are not read here."""
    for rank, size, others, launcher in _UNSUPPORTED:
        if rank not in environ or not others & environ.keys() or (size and environ.get(size, "1") == "1"):
            continue
        shown = ", ".join(f"{name}={environ[name]}" for name in (rank, size or min(others)))
        raise LoneRanksError(
            f"hvdtrain does not read the place of a rank from {launcher}: each process would train a model of its own. "
            f"Received: {shown}. Use horovodrun -np {environ[size] if size else 'N'} python -m hvdtrain …, mpirun or "
            "mpiexec of the same MPI, or let python -m hvdtrain launch choose. If no launcher started this process, "
            f"unset {rank}, which it has inherited.",
            rank=number(environ, rank),
        )


_LAUNCHERS: tuple[Callable[[Mapping[str, str]], Environment | None], ...] = (
    _horovodrun_gloo,
    _JSRUN.detect,  # before Open MPI, whose variables it sets as well, for IBM Spectrum MPI
    _OPEN_MPI.detect,
    _CRAY_PALS.detect,  # these two before hydra: they set variables of PMI as well
    _MVAPICH.detect,
    _HYDRA.detect,
    _srun,
    _unsupported,
    _indexed_job,  # after all that may run within its pods
)
"""Asked in this order: a launcher inside a Slurm step also passes on the variables of that step."""


def detect_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """Return the place of this process in its job; one that nobody started is the whole of it.

    Raises:
        LaunchError: a variable of the launcher is missing or malformed (it and its value are named).
        LoneRanksError: several processes were started that could not find one another: by srun or in a Kubernetes Job
            without MPI and without a secret, or by a launcher that Horovod does not work with. Or this process has
            inherited the variables of a job that has ended.
    """
    refuse_ended_launcher(environ)
    found = (detect(environ) for detect in _LAUNCHERS)
    alone = place(launcher="none", controller="none", world=(0, 1), local=(0, 1), job_id="none")
    return next((environment for environment in found if environment is not None), alone)
