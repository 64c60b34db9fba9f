"""Commands that are run to see what happens: with a time limit, and with nothing left behind."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    returncode: int | None
    """None where it took too long and was killed."""
    output: str
    """What it printed, standard error included."""

    def tail(self, lines: int = 6) -> str:
        """Return the last lines that say something."""
        return "\n".join([line.rstrip() for line in self.output.splitlines() if line.strip()][-lines:])


def run(command: Sequence[str], *, timeout: float, environ: Mapping[str, str] | None = None) -> Outcome:
    """Run `command` for `timeout` seconds at most; it and all it started are then killed.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return Outcome(process.returncode, output.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        return Outcome(None, _what_is_left(process).decode(errors="replace"))
    except BaseException:
        kill_tree(process.pid)
        raise


def _what_is_left(process: subprocess.Popen[bytes], *, patience: float = 5.0) -> bytes:
    """Return the output of a killed process, also where one that escaped still holds its pipe open."""
    try:
        return process.communicate(timeout=patience)[0]
    except subprocess.TimeoutExpired as expired:
        return expired.output or b""


def first_line(command: Sequence[str], *, timeout: float = 10.0) -> str | None:
    """Return the first line `command` prints, or None where it cannot be run or fails."""
    try:
        outcome = run(command, timeout=timeout)
    except OSError:
        return None
    lines = outcome.output.split("\n") if outcome.returncode == 0 else []
    return next((line.strip() for line in lines if line.strip()), None)


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants; launchers put ranks into sessions of their own."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
