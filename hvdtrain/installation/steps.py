"""Installation steps: announced, timed, logged, and killed with their children."""

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.config.errors import SetupError
from hvdtrain.runtime.diagnosis.machine import kill_tree


def short_hash(content: bytes) -> str:
    """Return twelve hexadecimal digits that identify `content`."""
    return hashlib.sha256(content).hexdigest()[:12]


def output_of(command: Sequence[str], **environ: str) -> bytes:
    """Return a command's output, whatever its exit code; empty if it does not exist."""
    try:
        return subprocess.run(
            command,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        ).stdout
    except OSError:
        return b""


_CAUSE = re.compile(r"CMake Error|fatal error|[Ee]rror: |ERROR: ")
"""Prefixes of compiler and pip output lines that hold the cause."""

SHORT = 20
"""Lines of output shown in full."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"setup: {text}", flush=True)


def install_with(apt: str, dnf: str) -> str:
    """Return this machine's install command, for apt and dnf package names."""
    if shutil.which("apt-get"):
        return f"sudo apt-get install {apt}"
    if shutil.which("dnf"):
        return f"sudo dnf install {dnf}"
    return f"install {apt} with your system's package manager"


class Steps:
    """Runs commands, each with its own log file."""

    def __init__(self, logs: Path):
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, what: str, command: Sequence[str], *, log: str, failure: str, environ: Mapping[str, str]) -> None:
        """Announce and run `command`; raise SetupError with relevant output and `failure` if it fails."""
        say(what)
        begin = time.monotonic()
        path = self._logs / log
        with path.open("wb") as file:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, process_group=0
            )
            try:
                code = process.wait()
            except BaseException:  # an interruption ends the command with its children
                kill_tree(process.pid)
                process.wait()
                raise
        if code != 0:
            raise SetupError(f"{failure} (the whole output: {path}):\n{excerpt(path.read_text(errors='replace'))}")
        say(f"  done in {time.monotonic() - begin:.0f} s")


def excerpt(output: str) -> str:
    """Return an output's first errors with context, and its end."""
    lines = output.splitlines()
    if len(lines) <= SHORT:
        return output.rstrip()
    hits = (number for number, line in enumerate(lines) if _CAUSE.search(line))
    near = dict.fromkeys(line for hit in hits for line in range(hit, min(hit + 5, len(lines))))
    causes = [lines[number] for number in list(near)[:20]]
    return "\n".join([*causes, "... the last lines:", *lines[-10:]])
