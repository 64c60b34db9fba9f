"""The command that starts the ranks of a job, chosen for the place and the programs at hand."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.runtime.launch.hosts import Host, take
from hvdtrain.runtime.launch.mpi import Mpi, MpiJob, find_mpi, mpi_command
from hvdtrain.runtime.launch.request import LaunchRequest
from hvdtrain.runtime.launch.sites import Site, find_site
from hvdtrain.runtime.launch.tools import Tools
from hvdtrain.runtime.launchers import DRAW_SECRET, SECRET_VARIABLE, has_secret, in_step

DEFAULT_RANKS = 2
"""On a machine without GPUs, as launch/train.sh."""


@dataclass(frozen=True)
class LaunchCommand:
    """What starts the ranks, and why it does it so."""

    words: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """Reasons, for the user."""
    secret: bool = False
    """Whether the environment needs a secret of the job (`HVDTRAIN_JOB_SECRET`), drawn for each."""

    def shown(self) -> str:
        """Return a line for a shell; it draws the secret when it is run."""
        line = shlex.join(self.words)
        return f"{SECRET_VARIABLE}={DRAW_SECRET} {line}" if self.secret else line


@dataclass
class LaunchPlanner:
    """Chooses the command for a job.

    Args:
        environ: environment variables of this process.
        tools: the programs at hand.
        cores: processor cores that this process may use.
        gpus: GPUs of this machine.
        root: whether this user is root.
    """

    environ: Mapping[str, str]
    tools: Tools
    cores: int
    gpus: int = 0
    root: bool = False
    notes: list[str] = field(default_factory=list)

    def plan(self, request: LaunchRequest) -> LaunchCommand:
        """Return the command for `request`.

        Raises:
            ConfigError: its options do not go together, or not with this place.
            LaunchError: a program that it needs is not there.
        """
        site = find_site(self.environ)
        self._refuse(request, site)
        if request.discovery is not None:
            return self._made(self._elastic(request))
        secret = False
        if site.name == "slurm":
            words, secret = self._slurm(request, site)
        elif site.name == "lsf" and self.tools.find("jsrun"):
            words = self._jsrun(request, site)
        elif site.hosts:
            words = self._on_hosts_of(request, site)
        else:
            words = self._by_hand(request)
        return self._made(words, secret=secret)

    def _made(self, words: list[str], *, secret: bool = False) -> LaunchCommand:
        return LaunchCommand(tuple(words), tuple(self.notes), secret)

    def _refuse(self, request: LaunchRequest, site: Site) -> None:
        if site.name in ("slurm", "pbs", "lsf") and (request.hosts or request.discovery is not None):
            option = "--hosts and --hostfile" if request.hosts else "--host-discovery-script"
            raise ConfigError(
                f"{option} are for hosts that no scheduler hands out. Received inside {site}: leave them out, its own "
                "hosts are used."
            )
        if site.name == "kubernetes" and not (site.hosts or request.hosts or request.ranks or request.discovery):
            raise LaunchError(
                "In Kubernetes the ranks are pods, which a manifest starts: launch/kubernetes/mpijob.yaml (MPI, with "
                "Kubeflow's operator) or launch/kubernetes/indexed-job-gloo.yaml (Gloo, without). To start ranks "
                "within this pod, say how many: -np N."
            )
        slots = sum(host.slots for host in request.hosts or site.hosts)
        if slots and (request.ranks or 0) > slots and not request.oversubscribe:
            raise ConfigError(
                f"-np must not be more than the {slots} slots of the hosts. Received: {request.ranks}. Take more hosts "
                "or slots, or add --oversubscribe."
            )

    def _elastic(self, request: LaunchRequest) -> list[str]:
        """Hosts come and go: only `horovodrun` over Gloo does that."""
        words = [self._need("horovodrun"), "--gloo", "-np", str(request.ranks or request.min_ranks or DEFAULT_RANKS)]
        for flag, value in (("--min-np", request.min_ranks), ("--max-np", request.max_ranks)):
            words += [flag, str(value)] if value else []
        words += ["--host-discovery-script", str(request.discovery)]
        self.notes.append("elastic jobs run over Gloo, by horovodrun")
        return [*words, *request.extra, *request.program(self.tools.absolute_python)]

    def _slurm(self, request: LaunchRequest, site: Site) -> tuple[list[str], bool]:
        """Prefer `srun` with PMIx, then the MPI's own launcher inside the allocation, then Gloo from `srun`."""
        ranks = request.ranks or site.ranks
        program = request.program(self.tools.python)
        # Ranks end by themselves where one fails, each with its own code. srun ends what still runs ten minutes later:
        # by then Slurm has noticed if a node is gone, and queues the job.
        srun = [self._need("srun"), "--kill-on-bad-exit=0", "--wait=600", "--cpu-bind=none"]
        cpus = self.environ.get("SLURM_CPUS_PER_TASK")  # since 22.05 srun does not take it over from sbatch
        srun += [f"--cpus-per-task={cpus}"] if cpus else []
        srun += ["--overlap"] if in_step(self.environ) else []  # a shell in a step holds what the ranks are to use
        srun += ["-n", str(request.ranks)] if request.ranks else []
        srun += ["--overcommit"] if request.oversubscribe else []
        mpi = None if request.controller == "gloo" else find_mpi(self.tools)
        plugins = set(re.findall(r"\w+", self.tools.output([srun[0], "--mpi=list"]))) if mpi else set()
        if mpi and mpi.family == "open_mpi" and "pmix" in plugins:
            self.notes.append(f"{site}: srun has PMIx, which {mpi} takes its ranks from")
            return [srun[0], "--mpi=pmix", *srun[1:], *request.extra, *program], False
        if mpi and ranks:
            self.notes.append(f"{site}: {mpi} starts its ranks itself, since srun has no PMIx for it")
            return self._mpi(mpi, request, ranks, ()), False
        if request.controller == "mpi":
            raise LaunchError(
                f"--mpi needs mpirun of the MPI that Horovod was built with, or srun --mpi=pmix, and -np. Received: "
                f"{mpi or 'no MPI'}, -np {ranks} inside {site}. Load the cluster's MPI module, or use --gloo."
            )
        self.notes.append(f"{site}: Gloo straight from srun, without MPI")
        return [srun[0], "--mpi=none", *srun[1:], *request.extra, *program], not has_secret(self.environ)

    def _jsrun(self, request: LaunchRequest, site: Site) -> list[str]:
        """One resource set a host, with all of its cores and GPUs: the ranks divide them themselves."""
        hosts = len(site.hosts)
        ranks = request.ranks or hosts * max(1, self.gpus)
        if ranks % hosts:
            raise ConfigError(
                f"jsrun starts the same number of ranks on each host. Received: -np {ranks} on {hosts} hosts of {site}."
            )
        self.notes.append(f"{site}: jsrun, {ranks // hosts} ranks on each of {hosts} hosts")
        words = [self._need("jsrun"), "--nrs", str(hosts), "--rs_per_host", "1", "--tasks_per_rs", str(ranks // hosts)]
        words += ["--cpu_per_rs", "ALL_CPUS", "--gpu_per_rs", "ALL_GPUS", "--bind", "none"]
        return [*words, *request.extra, *request.program(self.tools.python)]

    def _on_hosts_of(self, request: LaunchRequest, site: Site) -> list[str]:
        """Start ranks on the hosts of PBS, of LSF without jsrun, or of an MPIJob."""
        ranks = request.ranks or site.ranks or len(site.hosts)
        names = ("mpiexec", "mpirun") if site.name == "pbs" else ("mpirun", "mpiexec")
        mpi = None if request.controller == "gloo" else find_mpi(self.tools, names)
        hosts = site.hosts if request.oversubscribe else take(site.hosts, ranks)
        if mpi is not None:
            self.notes.append(f"{site}: {mpi} on {_count(len(hosts), 'host')}")
            return self._mpi(mpi, request, ranks, hosts)
        if request.controller == "mpi":
            raise LaunchError(f"--mpi needs mpirun or mpiexec on PATH inside {site}. Load the cluster's MPI module.")
        self.notes.append(f"{site}: Gloo by horovodrun, over ssh")
        return self._horovodrun(request, ranks, hosts, gloo=True)

    def _by_hand(self, request: LaunchRequest) -> list[str]:
        """Start ranks on this machine, or on the hosts that the user names."""
        ranks = request.ranks or sum(host.slots for host in request.hosts) or self.gpus or DEFAULT_RANKS
        hosts = request.hosts if request.oversubscribe else take(request.hosts, ranks)
        needs_mpi = request.controller == "mpi" or not self.tools.find("horovodrun")
        mpi = find_mpi(self.tools) if request.controller != "gloo" else None
        if needs_mpi and mpi is None:
            missing = "mpirun" if request.controller == "mpi" else "horovodrun"
            raise LaunchError(
                f"{missing} is not on PATH, nor beside this Python. Run: python -m hvdtrain setup, and activate the "
                "environment."
            )
        if mpi is not None and (needs_mpi or (mpi.family == "open_mpi" and mpi.major >= 5)):
            why = "as asked for" if request.controller == "mpi" else "horovodrun does not know its flags"
            self.notes.append(f"{mpi} by mpirun: {why if self.tools.find('horovodrun') else 'no horovodrun here'}")
            return self._mpi(mpi, request, ranks, hosts)
        self.notes.append("horovodrun, over Gloo" if request.controller == "gloo" else "horovodrun")
        return self._horovodrun(request, ranks, hosts, gloo=request.controller == "gloo")

    def _horovodrun(self, request: LaunchRequest, ranks: int, hosts: tuple[Host, ...], *, gloo: bool) -> list[str]:
        words = [self._need("horovodrun"), *(["--gloo"] if gloo else []), "-np", str(ranks)]
        words += ["-H", ",".join(map(str, hosts))] if hosts else []
        python = self.tools.absolute_python if hosts else self.tools.python
        return [*words, *request.extra, *request.program(python)]

    def _mpi(self, mpi: Mpi, request: LaunchRequest, ranks: int, hosts: tuple[Host, ...]) -> list[str]:
        oversubscribe = request.oversubscribe or (not hosts and self._alone() and ranks > self.cores)
        if oversubscribe and not request.oversubscribe:
            self.notes.append(f"{ranks} ranks on {_count(self.cores, 'core')}: they share them")
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"} <= self.environ.keys()
        as_root = self.root and not allowed
        if as_root and mpi.family == "open_mpi":
            self.notes.append("Open MPI as root, which it has to be told")
        python = self.tools.absolute_python if hosts else self.tools.python
        job = MpiJob(
            program=request.program(python),
            ranks=ranks,
            hosts=hosts,
            oversubscribe=oversubscribe,
            as_root=as_root,
            extra=request.extra,
        )
        return mpi_command(mpi, job, self.environ)

    def _alone(self) -> bool:
        return find_site(self.environ).name in ("plain", "kubernetes")

    def _need(self, name: str) -> str:
        program = self.tools.find(name)
        if program is None:
            raise LaunchError(
                f"{name} is not on PATH, nor beside this Python. Run: python -m hvdtrain setup, and activate the "
                "environment."
            )
        return program


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
