"""Launching ranks on this machine, and reading what rank 0 prints. No TensorFlow."""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.runtime.diagnosis.machine import kill_tree, launch_environment

BUSY = ("user", "nice", "system", "irq", "softirq")


class LaunchFailed(RuntimeError):
    """A command gave no answer; the message is the reason, in a line."""


@dataclass(frozen=True)
class Answer:
    """The answer of a command."""

    value: Any
    foreign_cores: float
    """Cores that other programs kept busy meanwhile."""


def launcher(controller: str, size: int) -> list[str]:
    """Return the command prefix that starts `size` ranks; empty for the controller `none`."""
    if controller == "none":
        return []
    if controller == "mpirun":
        return ["mpirun", "--bind-to", "none", "--oversubscribe", "-np", str(size)]
    return ["horovodrun", "--gloo", "-np", str(size)]


def shown(command: Sequence[str]) -> str:
    """Format a command for a shell."""
    return shlex.join("python" if word == sys.executable else word for word in command)


def ask(command: Sequence[str], word: str, *, limit_s: float, settings: Mapping[str, str] | None = None) -> Answer:
    """Run a command and return the JSON on its output line that begins with `word`; None if `word` is empty.

    Args:
        command: program and arguments.
        word: see above.
        limit_s: time limit in seconds.
        settings: additional environment variables.

    Raises:
        LaunchFailed: it cannot be started, fails, takes more than `limit_s` seconds, or prints no such line.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    begin, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    code, out, err = _run(command, launch_environment({**os.environ, **(settings or {}), "PATH": path}), limit_s)
    seconds = time.perf_counter() - begin
    foreign = max(0.0, _busy_seconds() - busy - (_own_seconds() - own)) / seconds
    found = re.search(rf"{word} ([{{\[].*)", out) if word else None
    if code or (word and found is None):
        raise LaunchFailed(reason_of(code, out, err))
    return Answer(json.loads(found[1]) if found else None, foreign)


def _run(command: Sequence[str], environ: dict[str, str], limit_s: float) -> tuple[int, str, str]:
    try:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchFailed(f"{command[0]}: {error.strerror}") from error
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        raise LaunchFailed(f"no answer after {limit_s:g} s") from None
    except BaseException:
        kill_tree(process.pid)
        raise
    return process.returncode, out, err


def reason_of(code: int, out: str, err: str) -> str:
    """Return why a command failed: our own error message if there is one, else its last output."""
    ours = re.search(r"hvdtrain: error: (.*(?:\n  .*)*)", err)
    if ours:
        return " ".join(ours[1].split())
    lines = [line.strip() for line in (err or out).splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b", line)]
    last = (errors or lines or ["it said nothing"])[-1]
    return f"exit code {code}: {last[:300]}"


def _busy_seconds() -> float:
    """Return the CPU seconds of all processes of the machine so far."""
    times = psutil.cpu_times()
    return sum(getattr(times, name, 0.0) for name in BUSY)


def _own_seconds() -> float:
    """Return the CPU seconds of this process and its finished children so far."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
