"""Where ranks would be started: in a scheduler's job, in a pod, or on a machine of one's own."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.launch.hosts import Host, parse_hosts, read_hostfile

SiteName = Literal["plain", "slurm", "pbs", "lsf", "kubernetes"]

_HOSTFILES = ("OMPI_MCA_orte_default_hostfile", "PRTE_MCA_prte_default_hostfile", "HYDRA_HOST_FILE")
"""Where the MPI operator of Kubernetes says which pods there are; I_MPI_HYDRA_HOST_FILE is Intel MPI's."""


@dataclass(frozen=True)
class Site:
    """Where ranks would be started, and what is known of it."""

    name: SiteName
    job: str = ""
    """The scheduler's name of the job."""
    hosts: tuple[Host, ...] = ()
    """Those that the scheduler gave the job; empty where its own launcher knows them, or there is none."""
    ranks: int | None = None
    """How many ranks the job was asked for with."""

    def __str__(self) -> str:
        return {
            "plain": "no scheduler",
            "slurm": f"Slurm's job {self.job}",
            "pbs": f"the PBS job {self.job}",
            "lsf": f"LSF's job {self.job}",
            "kubernetes": "a Kubernetes pod",
        }[self.name]


def find_site(environ: Mapping[str, str]) -> Site:
    """Return where this process is.

    Raises:
        LaunchError: a scheduler's list of hosts cannot be read.
    """
    found = (look(environ) for look in _LOOKS)
    return next((site for site in found if site is not None), Site("plain"))


def _slurm(environ: Mapping[str, str]) -> Site | None:
    if not {"SLURM_JOB_ID", "SLURM_JOB_NODELIST"} <= environ.keys():
        return None
    tasks = environ.get("SLURM_NTASKS", "")
    return Site("slurm", environ["SLURM_JOB_ID"], ranks=int(tasks) if tasks.isdecimal() else None)


def _pbs(environ: Mapping[str, str]) -> Site | None:
    if not {"PBS_JOBID", "PBS_NODEFILE"} <= environ.keys():
        return None
    hosts = read_hostfile(Path(environ["PBS_NODEFILE"]))
    return Site("pbs", environ["PBS_JOBID"], hosts, sum(host.slots for host in hosts))


def _lsf(environ: Mapping[str, str]) -> Site | None:
    """LSB_MCPU_HOSTS is "host1 4 host2 4"; where jobs have a launch node, it comes first, with one slot."""
    if not {"LSB_JOBID", "LSB_MCPU_HOSTS"} <= environ.keys():
        return None
    text = environ["LSB_MCPU_HOSTS"]
    pairs = re.findall(r"(\S+)\s+(\d+)(?:\s+|$)", text)
    if not pairs:
        raise LaunchError(f"LSB_MCPU_HOSTS must hold names and numbers, as in 'h1 4 h2 4'. Received: {text!r}.")
    hosts = parse_hosts(",".join(f"{name}:{slots}" for name, slots in pairs))
    if len(hosts) > 1 and hosts[0].slots == 1 and all(host.slots > 1 for host in hosts[1:]):
        hosts = hosts[1:]
    return Site("lsf", environ["LSB_JOBID"], hosts, sum(host.slots for host in hosts))


def _kubernetes(environ: Mapping[str, str]) -> Site | None:
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    file = next((environ[name] for name in (*_HOSTFILES, "I_MPI_HYDRA_HOST_FILE") if environ.get(name)), None)
    if file is None:
        return Site("kubernetes")
    hosts = read_hostfile(Path(file))
    return Site("kubernetes", "", hosts, sum(host.slots for host in hosts))


_LOOKS: tuple[Callable[[Mapping[str, str]], Site | None], ...] = (_slurm, _pbs, _lsf, _kubernetes)
