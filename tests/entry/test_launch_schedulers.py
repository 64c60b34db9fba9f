"""launch/pbs.sh, lsf.sh, mpirun.sh and horovodrun.sh, with stubs of the schedulers and of their launchers."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.entry.stub_machine import BASH, REPO
from tests.launching import job_environment

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("launch_schedulers")]

RANKS = """
echo "{name} $*" >>"$CALLS"
if [ -n "${{SAVES:-}}" ]; then
    trap 'echo "{name} got SIGUSR1" >>"$CALLS"; exit 75' USR1
    touch "$CALLS.up"
    for i in $(seq 200); do sleep 0.1; done
fi
exit "${{CODE:-0}}"
"""
"""Plays the launcher: it runs until SIGUSR1, if it is one that saves."""
NOTES = 'echo "{name} $*${{ARGS:+ ARGS=$ARGS}}" >>"$CALLS"; exit ${{{upper}_CODE:-0}}'


class Cluster:
    """A host of a scheduler's job, whose programs note how they are called."""

    def __init__(self, folder: Path):
        self.folder, self.bin, self.calls = folder, folder / "bin", folder / "calls"
        self.bin.mkdir()
        for name in ("mpiexec", "mpirun", "jsrun", "horovodrun"):
            self.has(name, RANKS.format(name=name))
        for name in ("qrerun", "qsub"):
            self.has(name, NOTES.format(name=name, upper=name.upper()))

    def has(self, name: str, script: str) -> None:
        path = self.bin / name
        path.write_text(f"#!{BASH}\n{script}\n")
        path.chmod(0o755)

    def mpi(self, version: str) -> None:
        """Both launchers print this version."""
        for name in ("mpiexec", "mpirun"):
            asked = f"[ \"$1\" != --version ] || {{ echo '{version}'; exit; }}"
            self.has(name, asked + RANKS.format(name=name))

    def start(self, script: str, *words: str, **environ: str) -> subprocess.Popen[str]:
        settings = job_environment(**environ, CALLS=str(self.calls), PYTHONPATH=str(REPO))
        settings["PATH"] = f"{self.bin}:{settings['PATH']}"
        return subprocess.Popen(
            [BASH, str(REPO / "launch" / script), *words],
            cwd=self.folder,
            env=settings,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def finish(self, process: subprocess.Popen[str]) -> tuple[int, list[str]]:
        """Return its exit code, and the calls of the stubs but for questions of the version."""
        try:
            text = process.communicate(timeout=120)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"it did not end: {process.communicate()[0]}")
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        assert calls, text
        python = "python" if shutil.which("python") else sys.executable
        return process.returncode, [call.replace(sys.executable, python) for call in calls]

    def run(self, script: str, *words: str, **environ: str) -> tuple[int, list[str]]:
        return self.finish(self.start(script, *words, **environ))

    def until_up(self) -> None:
        limit = time.monotonic() + 120
        while not Path(f"{self.calls}.up").exists():
            assert time.monotonic() < limit
            time.sleep(0.05)


@pytest.fixture
def cluster(tmp_path):
    return Cluster(tmp_path)


@pytest.fixture
def pbs(cluster):
    """The environment of a PBS job on two hosts, with a rank on each."""
    cluster.mpi("HYDRA build details:\n    Version:       4.2")
    cluster.has("qstat", "printf 'Job Id: 7.s\\n    Resource_List.walltime = %s\\n' \"${LIMIT:-10:00:00}\"")
    (cluster.folder / "nodes").write_text("h1\nh2\n")
    return {"PBS_JOBID": "7.s", "PBS_NODEFILE": str(cluster.folder / "nodes"), "PBS_JOBNAME": "name"}


LSF = {"LSB_JOBID": "9", "LSB_JOBNAME": "name", "LSB_MCPU_HOSTS": "batch 1 h1 42 h2 42"}
IN_PBS = "mpiexec -genvall -bind-to none -hosts h1:1,h2:1 -n 2 python -m hvdtrain"


def test_pbs_starts_ranks_on_its_hosts(cluster, pbs):
    done = cluster.run("pbs.sh", "cifar10", "--epochs", "9", **pbs)
    assert done == (0, [f"{IN_PBS} cifar10 --epochs 9 --run-dir runs/name-7 --resume auto"])
    done = cluster.run("pbs.sh", ARGS="digits --run-dir 'a b' --resume none", CODE="3", **pbs)
    assert done == (3, [f"{IN_PBS} digits --run-dir a b --resume none"])


def test_pbs_saves_before_the_time_limit_and_queues_again(cluster, pbs):
    done = cluster.run("pbs.sh", "digits", SAVES="yes", LIMIT="00:00:04", WARN_SECONDS="2", **pbs)
    assert done == (75, [f"{IN_PBS} digits --run-dir runs/name-7 --resume auto", "mpiexec got SIGUSR1", "qrerun 7.s"])


def test_qdel_saves_and_ends_the_job(cluster, pbs):
    process = cluster.start("pbs.sh", "digits", SAVES="yes", **pbs)
    cluster.until_up()
    process.send_signal(signal.SIGTERM)
    code, calls = cluster.finish(process)
    assert (code, calls[1:]) == (75, ["mpiexec got SIGUSR1"])


def test_lsf_starts_ranks_by_jsrun(cluster):
    sets = "--nrs 2 --rs_per_host 1 --tasks_per_rs {} --cpu_per_rs ALL_CPUS --gpu_per_rs ALL_GPUS --bind none"
    ours = "python -m hvdtrain digits --run-dir runs/name-9 --resume auto"
    assert cluster.run("lsf.sh", "digits", **LSF) == (0, [f"jsrun {sets.format(1)} {ours}"])
    assert cluster.run("lsf.sh", "digits", RANKS="12", **LSF) == (0, [f"jsrun {sets.format(6)} {ours}"])


@pytest.mark.parametrize(("number", "ends_with"), [(signal.SIGUSR1, 75), (signal.SIGTERM, 143)])
def test_lsf_ends_with_the_code_of_ranks_that_saved_unless_it_was_killed(cluster, number, ends_with):
    process = cluster.start("lsf.sh", "digits", SAVES="yes", **LSF)
    cluster.until_up()
    process.send_signal(number)
    code, calls = cluster.finish(process)
    assert (code, calls[1:]) == (ends_with, ["jsrun got SIGUSR1"])


@pytest.mark.parametrize(
    ("script", "words", "call"),
    [
        ("mpirun.sh", "-np 2 digits", "mpirun -genvall -bind-to none -n 2 python -m hvdtrain digits"),
        ("horovodrun.sh", "-np 2 digits", "horovodrun --gloo -np 2 python -m hvdtrain digits"),
        ("horovodrun.sh", "--hosts h1:2 t.py --lr 1", "horovodrun --gloo -np 2 -H h1:2 python t.py --lr 1"),
    ],
)
def test_wrappers_of_the_launchers(cluster, script, words, call):
    cluster.mpi("HYDRA build details:\n    Version:       4.2")
    assert cluster.run(script, *words.split(), CODE="4") == (4, [call])


def test_the_scripts_directives_are_read_by_the_schedulers():
    """They stand at the top, before the first command, or they would count as comments."""
    for script, mark in (("pbs.sh", "#PBS"), ("lsf.sh", "#BSUB")):
        lines = (REPO / "launch" / script).read_text().splitlines()
        first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
        marked = [number for number, line in enumerate(lines) if line.startswith(mark)]
        assert len(marked) >= 5
        assert max(marked) < first
        for line in (lines[number] for number in marked):
            assert shlex.split(line.removeprefix(mark)), line
