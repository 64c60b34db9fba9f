"""`launch`: print, or run, the command that starts a job's ranks in the place where it is called."""

import argparse
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hvdtrain.cli.parser import Parser, positive
from hvdtrain.cli.running import run_here
from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.config.registry import suggestion
from hvdtrain.runtime.devices import count_cores
from hvdtrain.runtime.diagnosis.machine import mpi_identity
from hvdtrain.runtime.launchers import DRAW_SECRET, SECRET_VARIABLE, detect_environment, has_secret, in_step
from hvdtrain.runtime.logs import LOGGER

_DESCRIPTION = """\
Prints the command that starts several processes of `python -m hvdtrain ARGS`, or of a script of your own, in the place
where it is called: horovodrun or mpirun on machines of your own, srun in a Slurm allocation, mpiexec in a PBS job,
jsrun in an LSF job. Only the command goes to standard output, and the reasons for it to standard error.
"""


OF_SCHEDULERS = ("srun", "jsrun")
"""Launchers that no environment of Python brings."""


class Host(NamedTuple):
    """A host, and how many ranks it takes."""

    name: str
    slots: int

    def __str__(self) -> str:
        return f"{self.name}:{self.slots}"


class Options(argparse.Namespace):
    """The parsed command line."""

    np: int | None
    hosts: tuple[Host, ...]
    gloo: bool
    mpi: bool
    oversubscribe: bool
    launcher_args: list[str]
    run: bool
    arguments: list[str]
    """Arguments of `python -m hvdtrain`; or a user's script and its arguments."""


def main(argv: list[str]) -> int:
    """Print or run the command, and return the exit code; once the command runs, there is no return."""
    return run_here(lambda: parse(argv), _launch)


def parse(argv: list[str]) -> Options:
    """Parse the options of `launch`; what follows them belongs to the ranks.

    Raises:
        UserError: a mistake in the options.
    """
    parser = Parser("launch", _DESCRIPTION, usage="%(prog)s [options] [ARGS of python -m hvdtrain ... | SCRIPT.py ...]")
    hosts, controller = parser.add_mutually_exclusive_group(), parser.add_mutually_exclusive_group()
    add, host = parser.add_argument, hosts.add_argument
    text = "number of ranks (default: every slot of the hosts or of the scheduler's job; else one per GPU, or 2)"
    add("-np", "-n", type=positive, metavar="N", help=text)
    text = "hosts, and how many ranks each takes"
    host("--hosts", type=lambda text: parse_hosts(text.split(",")), default=(), metavar="H1:N,H2:N", help=text)
    text = "the same in a file: `h1 slots=2` or `h1:2` on each line"
    host("--hostfile", type=read_hostfile, dest="hosts", metavar="FILE", help=text)
    controller.add_argument("--gloo", action="store_true", help="exchange over Gloo, without MPI")
    controller.add_argument("--mpi", action="store_true", help="exchange over MPI, started by its own launcher")
    add("--oversubscribe", action="store_true", help="allow more ranks than slots")
    add("--launcher-args", type=shlex.split, default=[], metavar="'...'", help="further flags of the launcher")
    add("--run", action="store_true", help="run the command in place of printing it")
    own, arguments = parser.split(argv)
    if arguments and arguments[0].startswith("-") and any(word.endswith(".py") for word in arguments):
        flag = arguments[0].partition("=")[0]
        raise ConfigError(f"launch has no option {flag!r}.{suggestion(flag, dict.fromkeys(parser.options, ''))}")
    options: Options = parser.parse_args(own, Options(arguments=arguments))
    return options


def _launch(options: Options) -> int:
    environment = detect_environment()
    if environment.size > 1 or environment.launcher not in ("none", "srun"):
        raise ConfigError(
            f"launch starts the launcher itself. Received: a start by {environment.launcher}. Start it once, without."
        )
    cores = count_cores(os.sched_getaffinity(0))
    machine = Machine(os.environ, sys.executable, cores, count_gpus(os.environ), root=os.geteuid() == 0)
    command = launch_command(options, machine)
    LOGGER.info(command.reason)
    if not options.run:
        print(command)
        return 0
    environ = {**os.environ, **({SECRET_VARIABLE: secrets.token_hex(32)} if command.secret else {})}
    LOGGER.info(shlex.join(command.words))
    try:
        os.execvpe(command.words[0], command.words, environ)
    except OSError as error:
        raise LaunchError(f"{command.words[0]} cannot be started ({error.strerror}).") from error


# -- the machine --


@dataclass(frozen=True)
class Machine:
    """This machine: its programs on PATH and those beside this Python, whose environment need not be activated."""

    environ: Mapping[str, str]
    python: str
    cores: int
    gpus: int = 0
    root: bool = False

    def on_path(self, name: str) -> str | None:
        """Return the path of a program on PATH."""
        return shutil.which(name, path=self.environ.get("PATH", os.defpath))

    def find(self, name: str) -> str | None:
        """Return how to call a program: by its name if it is on PATH, else by its path; None if it is missing."""
        return name if self.on_path(name) else shutil.which(name, path=str(Path(self.python).parent))

    def need(self, name: str) -> str:
        """Return how to call a program.

        Raises:
            LaunchError: it is missing.
        """
        program = self.find(name)
        if program is None:
            cure = "Run: python -m hvdtrain setup, and activate the environment."
            if name in OF_SCHEDULERS:
                cure = "It comes with the scheduler, whose variables are set here: load its module."
            raise LaunchError(f"{name} is not on PATH, nor beside this Python. {cure}")
        return program

    def output(self, *words: str) -> str:
        """Return what a command prints on both streams; "" if it cannot be run."""
        environ = dict(self.environ)
        try:
            done = subprocess.run(words, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return (done.stdout + done.stderr).decode(errors="replace")


def count_gpus(environ: Mapping[str, str], driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """Count this machine's NVIDIA GPUs, or those that CUDA_VISIBLE_DEVICES leaves visible, without a library."""
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(present)))).split(",")
    shown = next((at for at, word in enumerate(visible) if word.strip() in ("", "-1", "NoDevFiles")), len(visible))
    return min(present, shown)


# -- hosts, and the schedulers that hand them out --

_HOST = re.compile(r"([\w.-]+)(?:(?:\s*:\s*|\s+slots\s*=\s*)(0*[1-9]\d*))?(?:\s+max[-_]slots\s*=\s*\d+)?", re.ASCII)


def parse_hosts(words: Iterable[str], source: str = "--hosts") -> tuple[Host, ...]:
    """Parse hosts such as ``h1:2``, ``h1 slots=2``, or ``h1`` once for each slot; errors name `source`.

    Raises:
        ConfigError: one is written in another way.
    """
    slots: dict[str, int] = {}
    for word in words:
        match = _HOST.fullmatch(word.strip())
        if match is None:
            raise ConfigError(
                "Hosts are written NAME:RANKS, with at least one rank each, as in --hosts h1:2,h2:2. Received: "
                f"{word.strip()!r} in {source}."
            )
        slots[match[1]] = slots.get(match[1], 0) + int(match[2] or 1)
    return tuple(Host(name, number) for name, number in slots.items())


def read_hostfile(path: str) -> tuple[Host, ...]:
    """Read a file with a host on each line.

    Raises:
        ConfigError: it cannot be read, names no host, or a line is written in another way.
    """
    try:
        lines = [line.partition("#")[0] for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file of hosts cannot be read. Received: {path} ({error}).") from error
    hosts = parse_hosts(filter(str.strip, lines), path)
    if not hosts:
        raise ConfigError(f"The file of hosts names no host. Received: {path}.")
    return hosts


@dataclass(frozen=True)
class Site:
    """The scheduler around this process, and the hosts and ranks that it gave the job."""

    name: str
    """``slurm``, ``pbs``, ``lsf``, ``kubernetes``, or empty."""
    title: str = ""
    hosts: tuple[Host, ...] = ()
    """Empty where the scheduler's own launcher knows them."""
    ranks: int = 0
    """Ranks that a job of Slurm asked for."""


def find_site(environ: Mapping[str, str]) -> Site:
    """Return the scheduler around this process.

    Raises:
        LaunchError: its list of hosts cannot be read.
    """
    if {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"} <= environ.keys():
        tasks = environ.get("SLURM_NTASKS", "")
        ranks = int(tasks) if tasks.isdecimal() else 0
        return Site("slurm", f"Slurm's job {environ['SLURM_JOB_ID']}", ranks=ranks)
    if {"PBS_JOBID", "PBS_NODEFILE"} <= environ.keys():
        return Site("pbs", f"the PBS job {environ['PBS_JOBID']}", read_hostfile(environ["PBS_NODEFILE"]))
    if {"LSB_JOBID", "LSB_MCPU_HOSTS"} <= environ.keys():
        text = environ["LSB_MCPU_HOSTS"]
        pairs = re.findall(r"(\S+)\s+(\d+)(?:\s+|$)", text)
        if not pairs:
            raise LaunchError(f"LSB_MCPU_HOSTS must hold names and numbers, as in 'h1 4 h2 4'. Received: {text!r}.")
        hosts = parse_hosts(map(":".join, pairs), "LSB_MCPU_HOSTS")
        if len(hosts) > 1 and hosts[0].slots == 1 and all(host.slots > 1 for host in hosts[1:]):
            hosts = hosts[1:]  # the first one is a launch node
        return Site("lsf", f"LSF's job {environ['LSB_JOBID']}", hosts)
    if "KUBERNETES_SERVICE_HOST" in environ:
        return Site("kubernetes", "a Kubernetes pod")
    return Site("")


# -- the command --


@dataclass(frozen=True)
class LaunchCommand:
    """A command that starts the ranks; as a string, a line for a shell."""

    words: list[str]
    reason: str
    secret: bool = False
    """Whether each start needs a new secret of the job in the environment."""

    def __str__(self) -> str:
        return f"{SECRET_VARIABLE}={DRAW_SECRET} " * self.secret + shlex.join(self.words)


def launch_command(options: Options, machine: Machine) -> LaunchCommand:
    """Choose the command for a job on this machine.

    Raises:
        ConfigError: options that do not go together, or not with this place.
        LaunchError: a program is missing.
    """
    site = find_site(machine.environ)
    slots = sum(host.slots for host in options.hosts or site.hosts)
    if options.hosts and site.name in ("slurm", "pbs", "lsf"):
        raise ConfigError(
            f"--hosts and --hostfile are for hosts that no scheduler hands out. Received inside {site.title}: leave "
            "them out, its own hosts are used."
        )
    if site.name == "kubernetes" and not (slots or options.np):
        raise LaunchError(
            "In Kubernetes the ranks are pods, which a manifest starts: launch/kubernetes/mpijob.yaml (MPI, with "
            "Kubeflow's operator) or launch/kubernetes/indexed-job-gloo.yaml (Gloo, without). To start ranks "
            "within this pod, say how many: -np N."
        )
    if slots and (options.np or 0) > slots and not options.oversubscribe:
        raise ConfigError(
            f"-np must not be more than the {slots} slots of the hosts. Received: {options.np}. Take more hosts "
            "or slots, or add --oversubscribe."
        )
    if site.name == "slurm":
        return _srun(options, machine, site)
    if site.name == "lsf" and machine.find("jsrun"):
        return _jsrun(options, machine, site)
    ranks = options.np or slots or machine.gpus or 2
    hosts = _first_slots(options.hosts or site.hosts, slots if options.oversubscribe else ranks)
    place = f"{site.title}: " if site.hosts else ""
    mpi = None if options.gloo else find_mpi(machine, ("mpiexec", "mpirun") if site.name == "pbs" else MPIRUN)
    unknown = mpi is not None and mpi.name == "Open MPI" and mpi.major >= 5  # horovodrun does not know its flags
    if mpi and (site.hosts or options.mpi or unknown or not machine.find("horovodrun")):
        return LaunchCommand(_mpirun(mpi, options, machine, ranks=ranks, hosts=hosts), f"{place}{mpi} by {mpi.program}")
    if options.mpi and site.hosts:
        raise LaunchError(f"--mpi needs mpirun or mpiexec on PATH inside {site.title}. Load the cluster's MPI module.")
    if options.mpi:
        machine.need("mpirun")
    gloo = ["--gloo"] if options.gloo or site.hosts else []
    words = [machine.need("horovodrun"), *gloo, "-np", str(ranks), *_with_hosts("-H", hosts), *options.launcher_args]
    reason = f"{place}horovodrun" + (", over Gloo" if gloo else "")
    return LaunchCommand([*words, *_rank_command(options, machine, elsewhere=bool(hosts))], reason)


def _rank_command(options: Options, machine: Machine, *, elsewhere: bool = False) -> list[str]:
    """Return the command of each rank; other hosts need the path of this Python."""
    python = "python" if not elsewhere and machine.on_path("python") == machine.python else machine.python
    is_script = options.arguments[:1] and options.arguments[0].endswith(".py")
    return [python, *([] if is_script else ["-m", "hvdtrain"]), *options.arguments]


def _srun(options: Options, machine: Machine, site: Site) -> LaunchCommand:
    """Prefer `srun` with PMIx, then the MPI's own launcher inside the allocation, then Gloo from `srun`."""
    # Ranks end by themselves where one fails, each with its own code. srun ends what still runs ten minutes later:
    # by then Slurm has noticed if a node is gone, and queues the job.
    srun, flags = machine.need("srun"), ["--kill-on-bad-exit=0", "--wait=600", "--cpu-bind=none"]
    cpus = machine.environ.get("SLURM_CPUS_PER_TASK")  # since 22.05 srun does not take it over from sbatch
    flags += [f"--cpus-per-task={cpus}"] if cpus else []
    flags += ["--overlap"] if in_step(machine.environ) else []  # a shell in a step holds what the ranks are to use
    flags += ["-n", str(options.np)] if options.np else []
    flags += ["--overcommit"] if options.oversubscribe else []
    flags += [*options.launcher_args, *_rank_command(options, machine)]
    mpi, ranks = None if options.gloo else find_mpi(machine), options.np or site.ranks
    plugins = re.findall(r"\w+", machine.output(srun, "--mpi=list")) if mpi else []
    if mpi and mpi.name == "Open MPI" and "pmix" in plugins:
        reason = f"{site.title}: srun has PMIx, which {mpi} takes its ranks from"
        return LaunchCommand([srun, "--mpi=pmix", *flags], reason)
    if mpi and ranks:
        reason = f"{site.title}: {mpi} starts its ranks itself, since srun has no PMIx for it"
        return LaunchCommand(_mpirun(mpi, options, machine, ranks=ranks), reason)
    if options.mpi:
        raise LaunchError(
            f"--mpi needs mpirun of the MPI that Horovod was built with, or srun --mpi=pmix, and -np. Received: "
            f"{mpi or 'no MPI'}, -np {ranks} inside {site.title}. Load the cluster's MPI module, or use --gloo."
        )
    reason = f"{site.title}: Gloo straight from srun, without MPI"
    return LaunchCommand([srun, "--mpi=none", *flags], reason, secret=not has_secret(machine.environ))


def _jsrun(options: Options, machine: Machine, site: Site) -> LaunchCommand:
    """Make one resource set of each host, with all of its cores and GPUs, which the ranks divide themselves."""
    hosts = len(site.hosts)
    ranks = options.np or hosts * max(1, machine.gpus)
    if ranks % hosts:
        raise ConfigError(
            f"jsrun starts the same number of ranks on each host. Received: -np {ranks} on {hosts} hosts of "
            f"{site.title}."
        )
    words = [machine.need("jsrun"), "--nrs", str(hosts), "--rs_per_host", "1", "--tasks_per_rs", str(ranks // hosts)]
    words += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", "none", *options.launcher_args]
    reason = f"{site.title}: jsrun, {ranks // hosts} ranks on each of {hosts} hosts"
    return LaunchCommand([*words, *_rank_command(options, machine)], reason)


def _first_slots(hosts: Sequence[Host], ranks: int) -> list[Host]:
    """Return the first hosts, with as many slots as there are ranks."""
    taken: list[Host] = []
    for host in hosts:
        slots = min(host.slots, ranks - sum(each.slots for each in taken))
        taken += [Host(host.name, slots)] if slots > 0 else []
    return taken


def _with_hosts(flag: str, hosts: Sequence[Host]) -> list[str]:
    return [flag, ",".join(map(str, hosts))] if hosts else []


# -- the launchers of MPI libraries --

MPIRUN = ("mpirun", "mpiexec")
_FORWARDED = re.compile(
    r"(HVDTRAIN_|HOROVOD_|NCCL_|TF_(?!CONFIG$|CLI_)|KERAS_|XLA_|CUDA_(?!VISIBLE_DEVICES$)|OMP_|MKL_|UCX_|FI_)\w+"
    r"|PATH|LD_LIBRARY_PATH|LD_PRELOAD|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LANG|TMPDIR"
)
"""Variables that ranks on other hosts need."""
_KEEPALIVE = {"oob_tcp_keepalive_time": "5", "oob_tcp_keepalive_intvl": "2", "oob_tcp_keepalive_probes": "3"}
"""Open MPI 4 then notices a lost host after 11 s; it would take hours."""


@dataclass(frozen=True)
class Mpi:
    """The launcher of an MPI library."""

    name: str
    major: int
    """First number of the version."""
    program: str
    """Name or path of `mpirun` or `mpiexec`."""

    def __str__(self) -> str:
        return f"{self.name} {self.major}"


def find_mpi(machine: Machine, names: Sequence[str] = MPIRUN) -> Mpi | None:
    """Return the MPI whose launcher, of these names, is found first on PATH or beside this Python."""
    for program in filter(None, map(machine.find, names)):
        if found := mpi_identity(machine.output(program, "--version")):
            name, version = found
            return Mpi(name, int(version.partition(".")[0]), program)
    return None


def forwarded(environ: Mapping[str, str]) -> list[str]:
    """Return the names of set variables that ranks on other hosts need."""
    return sorted(filter(_FORWARDED.fullmatch, environ))


def _mpirun(mpi: Mpi, options: Options, machine: Machine, *, ranks: int, hosts: Sequence[Host] = ()) -> list[str]:
    """Return the words that start ranks bound to no cores: hvdtrain divides these itself (`--pin`)."""
    program, extra = _rank_command(options, machine, elsewhere=bool(hosts)), options.launcher_args
    sizes = {host.slots for host in hosts}
    if mpi.name == "Open MPI":
        may_share = not hosts and find_site(machine.environ).name != "slurm"
        share = options.oversubscribe or (may_share and ranks > machine.cores)
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= machine.environ.keys()
        words = ["--allow-run-as-root"] if machine.root and not allowed else []
        words += ["-np", str(ranks), "--bind-to", "none", "--map-by"]
        if mpi.major >= 5:
            words += ["slot:OVERSUBSCRIBE" if share else "slot"]
        else:
            words += ["slot", *(["--oversubscribe"] if share else [])]
        if hosts:
            words += _with_hosts("-H", hosts)
            words += [word for name in forwarded(machine.environ) for word in ("-x", name)]
            if mpi.major < 5:
                words += [word for name, value in _KEEPALIVE.items() for word in ("--mca", name, value)]
        return [mpi.program, *words, *extra, *program]
    words, last = [mpi.program], ["-n", str(ranks), *program]
    if mpi.name == "MPICH":
        words += ["-genvall", "-bind-to", "none", *_with_hosts("-hosts", hosts)]
    elif mpi.name == "Intel MPI":
        words += ["-genvall", "-genv", "I_MPI_PIN=0"]
        if len(sizes) > 1:  # its -hosts takes no slots: hosts of several sizes get an argument set each
            last = [word for host in hosts for word in (":", "-host", host.name, "-n", str(host.slots), *program)][1:]
        elif hosts:
            words += ["-hosts", ",".join(host.name for host in hosts), "-ppn", str(*sizes)]
    else:  # PALS knows the hosts from the scheduler, and passes all variables on
        words += ["--cpu-bind", "none", *(["--ppn", str(*sizes)] if len(sizes) == 1 else [])]
    return [*words, *extra, *last]
