"""The MPI at hand, and the flags of its `mpirun`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hvdtrain.runtime.launch.hosts import Host
from hvdtrain.runtime.launch.tools import Tools

Family = Literal["open_mpi", "mpich", "intel", "pals"]

_VERSIONS: tuple[tuple[Family, str], ...] = (
    ("open_mpi", r"(?:Open MPI|OpenRTE)\)? (\d+)"),
    ("intel", r"Intel\(R\) MPI Library.*?Version (\d+)"),
    ("mpich", r"HYDRA build details:\s+Version:\s+(\d+)"),
    ("pals", r"(?i)\bpals\b.*?(\d+)"),
)
"""What `mpirun --version` prints. MVAPICH is started by MPICH's hydra."""

_NAMES = {"open_mpi": "Open MPI", "intel": "Intel MPI", "mpich": "MPICH", "pals": "Cray PALS"}

_FORWARDED = re.compile(
    r"(HVDTRAIN_|HOROVOD_|NCCL_|TF_(?!CONFIG$|CLI_)|KERAS_|XLA_|CUDA_(?!VISIBLE_DEVICES$)|OMP_|MKL_|UCX_|FI_)\w+"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LANG|TMPDIR"
)
"""Variables that ranks on other hosts need."""

_NOTICE_LOST_HOSTS = {"oob_tcp_keepalive_time": "5", "oob_tcp_keepalive_intvl": "2", "oob_tcp_keepalive_probes": "3"}
"""Open MPI 4 then notices a lost host after 11 s; it would take hours."""


@dataclass(frozen=True)
class Mpi:
    """An MPI's launcher."""

    family: Family
    major: int
    """First number of the version."""
    program: str
    """How `mpirun` or `mpiexec` is called."""

    def __str__(self) -> str:
        return f"{_NAMES[self.family]} {self.major}"


@dataclass(frozen=True)
class MpiJob:
    """What an MPI's launcher is to start."""

    program: Sequence[str]
    ranks: int
    hosts: Sequence[Host] = ()
    """None: this host."""
    oversubscribe: bool = False
    """Start more ranks than there are cores or slots."""
    as_root: bool = False
    """Start them although this user is root, which Open MPI has to be told."""
    extra: Sequence[str] = ()
    """The user's own flags."""


def find_mpi(tools: Tools, names: Sequence[str] = ("mpirun", "mpiexec")) -> Mpi | None:
    """Return the MPI whose launcher, of these names, is found first: on PATH, or beside this Python."""
    for name in names:
        program = tools.find(name)
        found = program and identify(tools.output([program, "--version"]), program)
        if found:
            return found
    return None


def identify(version: str, program: str) -> Mpi | None:
    """Return the MPI whose `program` prints this `version`; None for an unknown one."""
    if "IBM Spectrum MPI" in version:  # made of Open MPI 4, with numbers of its own
        return Mpi("open_mpi", 4, program)
    for family, pattern in _VERSIONS:
        match = re.search(pattern, version, flags=re.DOTALL)
        if match:
            return Mpi(family, int(match[1]), program)
    return None


def mpi_command(mpi: Mpi, job: MpiJob, environ: Mapping[str, str]) -> list[str]:
    """Return the words that start `job`, its ranks bound to no cores: hvdtrain divides these itself (`--pin`)."""
    build: dict[Family, Callable[[Mpi, MpiJob, Mapping[str, str]], list[str]]] = {
        "open_mpi": _open_mpi,
        "mpich": _mpich,
        "intel": _intel,
        "pals": _pals,
    }
    return build[mpi.family](mpi, job, environ)


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that are set and that ranks on other hosts need."""
    return sorted(name for name in environ if _FORWARDED.fullmatch(name))


def _open_mpi(mpi: Mpi, job: MpiJob, environ: Mapping[str, str]) -> list[str]:
    words = [mpi.program, *(["--allow-run-as-root"] if job.as_root else []), "-np", str(job.ranks)]
    words += ["--bind-to", "none"]
    if mpi.major >= 5:
        words += ["--map-by", "slot:OVERSUBSCRIBE" if job.oversubscribe else "slot"]
    else:
        words += ["--map-by", "slot", *(["--oversubscribe"] if job.oversubscribe else [])]
    if job.hosts:
        words += ["-H", ",".join(map(str, job.hosts))]
        words += [word for name in forwarded(environ) for word in ("-x", name)]
        if mpi.major < 5:
            words += [word for name, value in _NOTICE_LOST_HOSTS.items() for word in ("--mca", name, value)]
    return [*words, *job.extra, *job.program]


def _mpich(mpi: Mpi, job: MpiJob, environ: Mapping[str, str]) -> list[str]:
    words = [mpi.program, "-genvall", "-bind-to", "none"]
    if job.hosts:
        words += ["-hosts", ",".join(map(str, job.hosts))]
    return [*words, *job.extra, "-n", str(job.ranks), *job.program]


def _intel(mpi: Mpi, job: MpiJob, environ: Mapping[str, str]) -> list[str]:
    """Its `-hosts` takes no slots: hosts of the same size get `-ppn`, others an argument set each."""
    words = [mpi.program, "-genvall", "-genv", "I_MPI_PIN=0"]
    sizes = {host.slots for host in job.hosts}
    if len(sizes) > 1:
        sets = [["-host", host.name, "-n", str(host.slots), *job.program] for host in job.hosts]
        return [*words, *job.extra, *(word for each in sets for word in (*each, ":"))][:-1]
    if job.hosts:
        words += ["-hosts", ",".join(host.name for host in job.hosts), "-ppn", str(sizes.pop())]
    return [*words, *job.extra, "-n", str(job.ranks), *job.program]


def _pals(mpi: Mpi, job: MpiJob, environ: Mapping[str, str]) -> list[str]:
    """It knows the job's hosts from the scheduler, and passes all variables on."""
    words = [mpi.program, "--cpu-bind", "none"]
    sizes = {host.slots for host in job.hosts}
    if len(sizes) == 1:
        words += ["--ppn", str(sizes.pop())]
    return [*words, *job.extra, "-n", str(job.ranks), *job.program]
