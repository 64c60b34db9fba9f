"""Jobs with a time on each line of their output, and all of their processes, wherever these have gone."""

import contextlib
import io
import os
import re
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.awake import awake_seconds
from tests.launching import start

_MARK = "HVDTRAIN_CHAOS_JOB"
"""Environment variable that every process of a job inherits."""
_LINGER_S = 60.0
"""Seconds that the processes of a job have to end in after their launcher."""


class Job:
    """A context in which a command runs; whatever it has started is killed at the end of it.

    Args:
        command: its words.
        cwd: the folder in which it runs.
        environ: environment variables besides the usual ones.
    """

    def __init__(self, command: Sequence[str], cwd: Path, environ: Mapping[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        self._lines: list[tuple[float, str]] = []
        environ = {_MARK: self._mark, **(environ or {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = start(command, cwd=cwd, environ=environ, **pipes)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.processes():
            _kill(pid)
        self._process.wait()

    @property
    def text(self) -> str:
        """What it has written so far."""
        return "".join(line for _, line in list(self._lines))

    @property
    def running(self) -> bool:
        """Whether its launcher still runs."""
        return self._process.poll() is None

    def first(self, pattern: str) -> float | None:
        """Return the time of the first line with `pattern`."""
        return next((when for when, line in list(self._lines) if re.search(pattern, line)), None)

    def wait(self, timeout: float) -> int | None:
        """Return its exit code; None if it has not ended within so many seconds in which the machine ran."""
        limit = awake_seconds() + timeout
        while self.running and awake_seconds() < limit:
            time.sleep(0.02)
        code = self._process.poll()
        if code is not None:
            self._reader.join(timeout=5.0)
        return code

    def wait_for_processes(self) -> set[int]:
        """Wait until its last process has ended, and return those that have not in time."""
        limit, left = awake_seconds() + _LINGER_S, self.processes()
        while left and awake_seconds() < limit:
            time.sleep(0.02)
            left = {pid for pid in left if _is_marked(pid, self._mark)}
        return left

    def processes(self) -> set[int]:
        """Return its live processes, the launcher's too."""
        return {pid for pid in _pids() if _is_marked(pid, self._mark)}

    def rank(self, rank: int) -> int:
        """Return the process of a rank: the one that has started no other of the same rank."""
        names = (f"OMPI_COMM_WORLD_RANK={rank}", f"HOROVOD_RANK={rank}")
        found = [pid for pid in self.processes() if _environment(pid) & {name.encode() for name in names}]
        parents = {_parent(pid) for pid in found}
        return next(pid for pid in found if pid not in parents)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in io.TextIOWrapper(self._process.stdout, errors="replace"):
            self._lines.append((time.time(), line))


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())


def _environment(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return set()


def _is_marked(pid: int, mark: str) -> bool:
    return f"{_MARK}={mark}".encode() in _environment(pid)


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
