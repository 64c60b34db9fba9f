"""Start jobs as a user would, with a limit on their time; used by the distributed and the entry tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.awake import awake_seconds

LOOK_S = 5.0
"""How often a job's time is looked at."""


@dataclass(frozen=True)
class Finished:
    """A job that ended by itself."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def job_environment(**extra: str) -> dict[str, str]:
    """The environment of a launched job: this Python first on PATH, and Open MPI allowed to run as root.

    A line that a script prints must be one write, or those of two ranks mix: unbuffered, each word would be one.
    """
    other = ("OMPI_COMM_", "PMIX_", "HOROVOD_", "TF_CPP_", "PYTHONUNBUFFERED")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(other)}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ.get('PATH', '')}"
    if os.geteuid() == 0:
        environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    environ.update(extra)
    return environ


def has_launcher(name: str) -> bool:
    """Whether `mpirun` or `horovodrun` is installed."""
    return shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is not None


def launcher(controller: str, size: int) -> list[str]:
    """The words before `python` that start `size` ranks."""
    if controller == "none":
        return []
    name = "mpirun" if controller == "mpirun" else "horovodrun"
    if not has_launcher(name):
        pytest.skip(f"{name} is not installed")
    if controller == "mpirun":
        return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(size)]
    flag = {"gloo": ["--gloo"], "mpi": ["--mpi"], "horovodrun": []}[controller]
    return ["horovodrun", *flag, "-np", str(size)]


def start(command: Sequence[str], *, cwd: Path, stderr: int, environ: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start `command` in a process group of its own, with its output in a pipe."""
    return subprocess.Popen(
        list(command),
        cwd=cwd,
        env=job_environment(**environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def run(command: Sequence[str], *, cwd: Path, timeout: float, **environ: str) -> Finished:
    """Run `command` to its end; after `timeout` seconds its whole process group is killed and the test fails.

    These are seconds in which the machine ran: see `tests.awake`.
    """
    process = start(command, cwd=cwd, stderr=subprocess.PIPE, environ=environ)
    limit = awake_seconds() + timeout
    while True:
        try:
            out, err = process.communicate(timeout=min(timeout, LOOK_S))
        except subprocess.TimeoutExpired:
            if awake_seconds() < limit:
                continue
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            pytest.fail(f"{' '.join(command)} did not end within {timeout} s:\n{out[-3000:]}\n{err[-3000:]}")
        return Finished(process.returncode, out, err)


def hvdtrain(controller: str, size: int, *words: str, cwd: Path, timeout: float = 400, **environ: str) -> Finished:
    """Run `python -m hvdtrain words…` under a launcher (none, gloo, mpi, horovodrun or mpirun)."""
    command = [*launcher(controller, size), sys.executable, "-m", "hvdtrain", *words]
    return run(command, cwd=cwd, timeout=timeout, **environ)


TRAIN_ALL = """
import json, sys
import hvdtrain
hvdtrain.init()
from hvdtrain.cli.train import parse
from hvdtrain.runtime.session import current
from hvdtrain.runs.run import train
for words in json.loads(sys.argv[1]):
    request = parse(words)
    train(current(), request.config, request.files.run_dir)
"""


def train_all(
    controller: str, size: int, commands: Sequence[Sequence[str]], *, cwd: Path, timeout: float, **environ: str
) -> None:
    """Train what several command lines of `train` say in the same processes: TensorFlow starts once, not for each."""
    words = [sys.executable, "-c", TRAIN_ALL, json.dumps([list(command) for command in commands])]
    job = run([*launcher(controller, size), *words], cwd=cwd, timeout=timeout, **environ)
    assert job.code == 0, job.text[-4000:]


USE_ALL = """
import importlib, json, sys
import hvdtrain
hvdtrain.init()
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.runtime.session import current
commands, mistaken = json.loads(sys.argv[1])
for verb, *words in commands:
    module = importlib.import_module(f"hvdtrain.cli.{verb}")
    try:
        commits = (lambda: None,) if verb == "train" else ()  # of elastic jobs
        getattr(module, f"_{verb}")(*commits, current(), module.parse(words))
    except UserError as error:
        if not mistaken:
            raise
        print("ERROR", json.dumps(on_command_line(error.message)))
    else:
        assert not mistaken, words
"""


def use_all(controller: str, size: int, commands: Sequence[Sequence[str]], *, cwd: Path, timeout: float = 400) -> str:
    """Run several command lines of evaluate, predict and generate in the same processes; return what was printed."""
    job = run([*launcher(controller, size), *_use(commands, mistaken=False)], cwd=cwd, timeout=timeout)
    assert job.code == 0, job.text[-4000:]
    return job.out


def errors_of(commands: Sequence[Sequence[str]], *, cwd: Path, timeout: float = 400) -> list[str]:
    """Run several command lines of these verbs, which must all fail, in one process; return their messages."""
    job = run(_use(commands, mistaken=True), cwd=cwd, timeout=timeout)
    assert job.code == 0, job.text[-4000:]
    return [json.loads(line.removeprefix("ERROR ")) for line in job.out.splitlines() if line.startswith("ERROR ")]


def _use(commands: Sequence[Sequence[str]], *, mistaken: bool) -> list[str]:
    return [sys.executable, "-c", USE_ALL, json.dumps([[list(command) for command in commands], mistaken])]
