"""Start jobs as a user would, with a limit on their time; used by the distributed and the entry tests."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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


def run(command: Sequence[str], *, cwd: Path, timeout: float, code: int | None = 0, **environ: str) -> Finished:
    """Run `command` to its end, with the exit code `code`, or any if it is None.

    After `timeout` seconds, in which the machine ran (see `tests.awake`), its whole process group is killed and the
    test fails.
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
        job = Finished(process.returncode, out, err)
        assert code in (None, job.code), f"exit code {job.code}:\n{job.text[-5000:]}"
        return job


class Job:
    """A job under way, with its output in a file; its process group is killed when the context ends."""

    def __init__(self, command: Sequence[str], *, cwd: Path, log: str = "log", **environ: str) -> None:
        self.folder, self.log = cwd, cwd / log
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=job_environment(**environ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait(self, condition: Callable[[], object] = lambda: False, *, seconds: float = 120.0) -> int | None:
        """Wait for a condition or the end of the job, whichever comes first; return the exit code, if it has one."""
        limit = awake_seconds() + seconds
        while not condition() and self.process.poll() is None and awake_seconds() < limit:
            time.sleep(0.05)
        return self.process.poll()

    def wait_for(self, text: str) -> None:
        """Wait until the job has printed `text`."""
        self.wait(lambda: text in self.text)
        assert text in self.text, self.text[-3000:]


def hvdtrain(
    controller: str, size: int, *words: str, cwd: Path, timeout: float = 400, code: int | None = 0, **environ: str
) -> Finished:
    """Run `python -m hvdtrain words…` under a launcher (none, gloo, mpi, horovodrun or mpirun), as `run` does."""
    command = [*launcher(controller, size), sys.executable, "-m", "hvdtrain", *words]
    return run(command, cwd=cwd, timeout=timeout, code=code, **environ)


def summary_of(run_folder: Path) -> dict[str, Any]:
    """Return the figures of a run."""
    return json.loads((run_folder / "summary.json").read_text())


USE_ALL = """
import json, sys
import hvdtrain
hvdtrain.init()
from hvdtrain.cli import inference, train
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.runtime.session import current
commands, mistaken = json.loads(sys.argv[1])
for verb, *words in commands:
    try:
        if verb == "train":
            train._train(lambda: None, current(), train.parse(words))  # without the commits of elastic jobs
        else:
            getattr(inference, f"_{verb}")(current(), getattr(inference, f"parse_{verb}")(words))
    except UserError as error:
        if not mistaken:
            raise
        print("ERROR", json.dumps(on_command_line(error.message)))
    else:
        assert not mistaken, words
"""


def use_all(
    controller: str, size: int, commands: Sequence[Sequence[str]], *, cwd: Path, timeout: float = 400, **environ: str
) -> str:
    """Run command lines of train, evaluate, predict and generate in the same processes; return what was printed.

    TensorFlow starts once, not for each.
    """
    words = [*launcher(controller, size), *_use(commands, mistaken=False)]
    return run(words, cwd=cwd, timeout=timeout, **environ).out


def errors_of(commands: Sequence[Sequence[str]], *, cwd: Path, timeout: float = 400) -> list[str]:
    """Run several command lines of these verbs, which must all fail, in one process; return their messages."""
    job = run(_use(commands, mistaken=True), cwd=cwd, timeout=timeout)
    return [json.loads(line.removeprefix("ERROR ")) for line in job.out.splitlines() if line.startswith("ERROR ")]


def _use(commands: Sequence[Sequence[str]], *, mistaken: bool) -> list[str]:
    return [sys.executable, "-c", USE_ALL, json.dumps([[list(command) for command in commands], mistaken])]
