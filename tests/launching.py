"""Start jobs as a user would, with a limit on their time; used by the distributed and the entry tests."""

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from tests.awake import awake_seconds

LOOK_S = 0.05
"""How often a job is looked at."""


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


def launched(
    controller: str, size: int, *words: str, options: Sequence[str] = (), program: str = sys.executable
) -> list[str]:
    """The command that starts `size` ranks of a program with `words`, and with more options of the launcher."""
    return [*launcher(controller, size), *options, program, *words]


def start(
    command: Sequence[str], *, cwd: Path, stdout: Any, stderr: Any, environ: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a command in a process group of its own, with nothing to read."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env=job_environment(**environ),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


class Job:
    """A command under way, in a process group of its own, which is killed when the context ends.

    Job(launched("mpirun", 2, "train.py"), cwd=folder).expect("no such file", code=2)

    with Job(launched("mpirun", 2, "train.py"), cwd=folder) as job:
        job.wait_for("epoch 2")
    """

    def __init__(self, command: Sequence[str], *, cwd: Path, **environ: str) -> None:
        self.command, self.folder = list(command), cwd
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  (closed with the job)
        self._ended: list[str] | None = None
        out, err = self._files
        self.process = start(self.command, cwd=cwd, stdout=out, stderr=err, environ=environ)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ended is None:
            with contextlib.suppress(ProcessLookupError):  # of whatever outlives the first of its processes, too
                self.kill()
            self._ended = self._written()
            for file in self._files:
                file.close()

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self.process.poll()

    @property
    def out(self) -> str:
        """What it has written to standard output so far."""
        return self._written()[0]

    @property
    def err(self) -> str:
        return self._written()[1]

    @property
    def text(self) -> str:
        """Both, one after the other."""
        return "".join(self._written())

    def signal(self, number: int) -> None:
        """Send a signal to all of it, as a terminal does."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def wait(self, condition: Callable[[], object] = lambda: False, *, seconds: float = 120.0) -> int | None:
        """Wait for a condition or the end of the job, whichever comes first; return the exit code, if it has one.

        Counted are seconds in which the machine ran (see `tests.awake`).
        """
        limit = awake_seconds() + seconds
        while not condition() and self.code is None and awake_seconds() < limit:
            time.sleep(LOOK_S)
        return self.code

    def wait_for(self, text: str, *, seconds: float = 120.0) -> None:
        """Wait until the job has written `text`."""
        self.wait(lambda: text in self.text, seconds=seconds)
        assert text in self.text, self.text[-3000:]

    def expect(self, *said: str, code: int | None = 0, timeout: float = 150.0) -> Self:
        """Wait for its end, with this exit code, or any if it is None, and with `said` in its output."""
        with self:
            self.wait(seconds=timeout)
            late = self.code is None
        if late:
            what = f"{shlex.join(self.command)} did not end within {timeout} s"
            pytest.fail(f"{what}:\n{self.out[-3000:]}\n{self.err[-3000:]}")
        assert code in (None, self.code), f"exit code {self.code}:\n{self.text[-5000:]}"
        for each in said:
            assert each in self.text, f"not said: {each}\n{self.text[-5000:]}"
        return self

    def _written(self) -> list[str]:
        if self._ended is not None:
            return self._ended
        texts = (os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0) for file in self._files)
        return [io.TextIOWrapper(io.BytesIO(text), errors="replace").read() for text in texts]


def hvdtrain(
    controller: str, size: int, *words: str, cwd: Path, timeout: float = 400, code: int | None = 0, **environ: str
) -> Job:
    """Run `python -m hvdtrain words…` under a launcher (none, gloo, mpi, horovodrun or mpirun) to its end."""
    command = launched(controller, size, "-m", "hvdtrain", *words)
    return Job(command, cwd=cwd, **environ).expect(code=code, timeout=timeout)


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
    command = launched(controller, size, *_use(commands, mistaken=False))
    return Job(command, cwd=cwd, **environ).expect(timeout=timeout).out


def errors_of(commands: Sequence[Sequence[str]], *, cwd: Path, timeout: float = 400) -> list[str]:
    """Run several command lines of these verbs, which must all fail, in one process; return their messages."""
    job = Job(launched("none", 1, *_use(commands, mistaken=True)), cwd=cwd).expect(timeout=timeout)
    return [json.loads(line.removeprefix("ERROR ")) for line in job.out.splitlines() if line.startswith("ERROR ")]


def _use(commands: Sequence[Sequence[str]], *, mistaken: bool) -> list[str]:
    return ["-c", USE_ALL, json.dumps([[list(command) for command in commands], mistaken])]
