"""The engine of every comparison: sides take turns, each launch in fresh processes. No TensorFlow.

A process that is measured answers with one line of JSON, which rank 0 prints by `say`.
"""

import json
import os
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hvdtrain.bench.results import Figure, Round, Run
from hvdtrain.runtime.diagnosis.machine import kill_tree, launch_environment

WORD = "HVDTRAIN-BENCH"
BUSY = ("user", "nice", "system", "irq", "softirq")


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command to measure."""

    name: str
    setting: Mapping[str, Any] = field(default_factory=dict)
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables."""
    group: str = ""
    """Jobs of a group take turns; groups follow one another."""
    skipped: str | None = None
    """Why it cannot run."""

    @property
    def shown(self) -> str:
        """The command as one types it."""
        words = ["python" if word == sys.executable else word for word in self.command]
        return " ".join([*(f"{name}={value}" for name, value in self.environ.items()), shlex.join(words)])


@dataclass(frozen=True)
class Answer:
    """The answer of a launch."""

    figures: Mapping[str, Figure]
    facts: Mapping[str, Any] = field(default_factory=dict)
    foreign_cores: float = 0.0
    """Cores that other programs kept busy meanwhile."""


class LaunchFailed(RuntimeError):
    """A command gave no answer; the message is the reason, in a line."""


def say(figures: Mapping[str, Any], **facts: Any) -> None:
    """Print figures and facts of this launch on the line that the engine parses."""
    print(f"{WORD} {json.dumps({'figures': figures, 'facts': facts})}", flush=True)


def launcher(controller: str, size: int) -> list[str]:
    """Return the command prefix that starts `size` ranks; empty for the controller `none`."""
    if controller == "none":
        return []
    if controller in ("mpirun", "mpi"):
        return ["mpirun", "--bind-to", "none", "--oversubscribe", "-np", str(size)]
    return ["horovodrun", "--gloo", "-np", str(size)]


Launch = Callable[[Job], Answer]


def measure(
    jobs: Sequence[Job],
    rounds: int,
    launched: Launch,
    *,
    log: Callable[[str], None],
    keep: Callable[[list[Run]], None] = lambda runs: None,
) -> list[Run]:
    """Launch every job in every round, in turn, and return the results in the order of the jobs.

    A job that fails is not started again; its earlier rounds and the reason are kept.

    Args:
        jobs: to measure; those with a reason to skip them are only listed.
        rounds: launches of each.
        launched: launches a job once.
        log: receives a line of progress per launch.
        keep: receives all results so far, after each round of a group.
    """
    runs = [
        Run(name=job.name, setting=dict(job.setting), command=job.shown, skipped=job.skipped, rounds=[]) for job in jobs
    ]
    last = None
    for group, number, index in turns(jobs, rounds):
        if last not in (None, (group, number)):
            keep(runs)
        last = group, number
        if runs[index].skipped is None:
            runs[index] = _with_round(runs[index], jobs[index], launched)
            log(_line(number, runs[index]))
    keep(runs)
    return runs


def turns(jobs: Sequence[Job], rounds: int) -> Iterator[tuple[str, int, int]]:
    """Return (group, round, index of the job) in the order of measuring.

    The jobs of a group take turns, A B C then C B A, so that compared sides run close together, and a machine that
    slows down favours none.
    """
    for group in dict.fromkeys(job.group for job in jobs):
        members = [index for index, job in enumerate(jobs) if job.group == group]
        for number in range(rounds):
            for index in members if number % 2 == 0 else reversed(members):
                yield group, number, index


def _with_round(run: Run, job: Job, launched: Launch) -> Run:
    try:
        answer = launched(job)
    except LaunchFailed as error:
        return replace(run, skipped=str(error))
    taken = Round(figures=dict(answer.figures), foreign_cores=answer.foreign_cores)
    return replace(run, rounds=[*run.rounds, taken], facts=dict(answer.facts))


def _line(number: int, run: Run) -> str:
    what = f"round {number + 1}  {run.name:22} " + " ".join(str(value) for value in run.setting.values())
    if run.skipped is not None:
        return f"{what}  not measured: {run.skipped}"
    shown = [
        f"{len(value)} x {name}" if isinstance(value, dict) else f"{name} {np.median(value):.4g}"
        for name, value in run.rounds[-1].figures.items()
        if value is not None
    ]
    return f"{what}  " + "  ".join(shown)


def launch(job: Job, *, limit_s: float) -> Answer:
    """Run a job's command on this machine.

    Raises:
        LaunchFailed: it cannot be started, fails, takes more than `limit_s` seconds, or gives no figures.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environ = launch_environment({**os.environ, **job.environ, "PATH": path})
    begin, busy, own = time.perf_counter(), _busy_seconds(), _own_seconds()
    code, out, err = _run(job.command, environ, limit_s)
    seconds = time.perf_counter() - begin
    foreign = max(0.0, _busy_seconds() - busy - (_own_seconds() - own)) / seconds
    found = re.search(rf"{WORD} (\{{.*)", out)
    if code or found is None:
        raise LaunchFailed(reason_of(code, out, err))
    return Answer(**json.loads(found[1]), foreign_cores=foreign)


def _run(command: Sequence[str], environ: dict[str, str], limit_s: float) -> tuple[int, str, str]:
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(command, env=environ, text=True, errors="replace", start_new_session=True, **pipes)
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
