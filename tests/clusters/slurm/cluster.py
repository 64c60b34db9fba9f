"""A Slurm cluster of this machine's own: slurmctld, munged and two nodes, on hosts that are network namespaces.

    python -m tests.clusters.slurm.cluster bash

All daemons live in the hosts' namespaces and end with them. A second cluster on the same machine has other ones.
"""

import contextlib
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.awake import awake_seconds
from tests.clusters.namespaces import Hosts, NoHosts, address, hosts, name

DAEMONS = ("munged", "mungekey", "slurmctld", "slurmd", "sbatch", "srun")
NODES = 2
_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
_CONFIGURATION = """
ClusterName=test
SlurmctldHost={controller}({address})
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdTimeout=10
KillWait=10
SlurmdParameters=config_overrides
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
# The hosts share this machine's /tmp, but not their memory file systems.
_MPI_CONFIGURATION = "PMIxCliTmpDirBase=/dev/shm\n"


@dataclass(frozen=True)
class Cluster:
    """Two nodes, `host1` with the controller and `host2`, and a folder that both see."""

    hosts: Hosts
    folder: Path

    @property
    def work(self) -> Path:
        """The folder in which commands run, and jobs therefore, too."""
        return self.folder / "work"

    def run(self, *words: str, timeout: float = 60, **environ: str) -> str:
        """Run a command on host1, and return what it prints."""
        done = self.hosts.exec(1, ["env", f"--chdir={self.work}", *words], timeout=timeout, **self._environ(environ))
        assert done.returncode == 0, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, *words: str, **environ: str) -> str:
        """Run sbatch, and return the job's number."""
        return self.run("sbatch", "--parsable", *words, **environ).strip()

    def facts(self, job: str) -> dict[str, str]:
        """Return what Slurm tells of a job."""
        return dict(re.findall(r"(\w+)=(\S+)", self.run("scontrol", "show", "job", job)))

    def wait_for_end(self, job: str, patience: float = 120) -> dict[str, str]:
        """Return what Slurm tells of a job once it has ended for good."""
        return self.wait(job, lambda facts: facts["JobState"] in _ENDED, patience)

    def wait(self, job: str, is_so, patience: float = 60) -> dict[str, str]:
        """Return what Slurm tells of a job once `is_so` is true of it."""
        limit = awake_seconds() + patience
        while not is_so(facts := self.facts(job)):
            assert awake_seconds() < limit, self.standstill(job, facts)
            time.sleep(0.3)
        return facts

    def standstill(self, job: str, facts: Mapping[str, str]) -> str:
        """Return where a job stands: its end is awaited in vain, and this shows whose fault it is.

        That is what Slurm and its daemons tell, the processes of both nodes, and the job's log, with the stacks of its
        ranks last.
        """
        shown = [str(dict(facts))]
        for number in range(1, NODES + 1):
            columns = "pid,ppid,stat,wchan:24,etimes,args"
            shown.append(f"{name(number)}:\n" + self.hosts.exec(number, ["ps", "-eww", "-o", columns]).stdout)
            # Each rank prints its stacks; srun, whose command line has the same words, would end.
            self.hosts.exec(number, ["pkill", "-QUIT", "-f", "^[^ ]*python[^ ]* -m hvdtrain "])
        time.sleep(2)
        return "\n".join([*shown, self._logs(), self.log(job)[-9000:]])

    def log(self, job: str) -> str:
        """Return what a job has printed, if it was submitted with launch/slurm.sbatch."""
        return "".join(path.read_text(errors="replace") for path in self.work.glob(f"*-{job}.log"))

    def wait_for_text(self, job: str, text: str, patience: float = 60) -> None:
        """Wait until a job has printed `text`."""
        limit = awake_seconds() + patience
        while text not in self.log(job):
            assert awake_seconds() < limit, self.log(job)[-3000:]
            time.sleep(0.1)

    def start_node(self, number: int) -> None:
        """Start slurmd on a host."""
        self._start(number, "slurmd", "-f", str(self.folder / "slurm.conf"), "-N", name(number))

    def start(self) -> None:
        """Start all daemons, and wait for the nodes."""
        run, log = self.folder / "run", self.folder / "log"
        key, seed = f"--key-file={self.folder}/munge.key", f"--seed-file={run}/seed"
        files = [f"--socket={run}/munge.socket", f"--pid-file={run}/munged.pid", f"--log-file={log}/munged.log"]
        self._start(1, "munged", "--force", key, seed, *files)
        self._start(1, "slurmctld", "-f", str(self.folder / "slurm.conf"))
        for number in range(1, NODES + 1):
            self.start_node(number)
        limit = awake_seconds() + 30
        while self.run("sinfo", "--noheader", "--format=%T %D").split() != ["idle", str(NODES)]:
            if awake_seconds() > limit:
                raise NoHosts(f"Slurm does not start: {self._logs()}")
            time.sleep(0.2)

    def _start(self, number: int, *words: str) -> None:
        done = self.hosts.exec(number, list(words), **self._environ({}))
        if done.returncode:
            raise NoHosts(f"{words[0]} does not start: {done.stderr.strip()}\n{self._logs()}")

    def _environ(self, more: Mapping[str, str]) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), **more}

    def _logs(self) -> str:
        return "".join(path.read_text(errors="replace")[-1500:] for path in (self.folder / "log").iterdir())


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Context with a cluster whose files are in `folder`, which must be short: sockets are made in it.

    Raises:
        NoHosts: it takes the rights of root, a program is missing, or a daemon does not start.
    """
    missing = [daemon for daemon in DAEMONS if shutil.which(daemon, path=_PATH) is None]
    if missing:
        raise NoHosts(f"{', '.join(missing)}: not installed (packages slurm-wlm and munge)")
    with hosts(NODES) as found:
        for each in ("run", "log", "state", "spool", "work"):
            (folder / each).mkdir()
        numbers = range(1, NODES + 1)
        nodes = "\n".join(f"NodeName={name(n)} NodeAddr={address(n)} CPUs=4 RealMemory=4000" for n in numbers)
        text = _CONFIGURATION.format(controller=name(1), address=address(1), folder=folder, nodes=nodes)
        (folder / "slurm.conf").write_text(text)
        (folder / "mpi.conf").write_text(_MPI_CONFIGURATION)
        subprocess.run(["mungekey", "--create", f"--keyfile={folder}/munge.key"], check=True, env={"PATH": _PATH})
        made = Cluster(found, folder)
        made.start()
        yield made


def main() -> int:
    """Run a command on the first host of a cluster, and return its exit code."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as folder, cluster(Path(folder)) as made:
        print(json.dumps({"work": str(made.work)}), flush=True)
        words = made.hosts.words(1, ["env", f"--chdir={made.work}", *sys.argv[1:]])
        environ = made.hosts.environ(SLURM_CONF=str(made.folder / "slurm.conf"))
        return subprocess.run(words, check=False, env=environ).returncode


if __name__ == "__main__":
    sys.exit(main())
