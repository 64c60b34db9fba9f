"""Every way to hang and to crash, on each rank, under each controller."""

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import BY_LAUNCHER
from tests.chaos.jobs import Job
from tests.launching import launcher

SCRIPT = Path(__file__).parents[1] / "distributed" / "faulty_script.py"
HANG_TIMEOUT_S = 3.0
FOUND_S = HANG_TIMEOUT_S + 5.0
"""From the fault to the message of a hang, at most."""
_LAUNCH_S = 120.0
_CONTROLLERS = ("gloo", "mpirun")
_WAITS = r"rank {other} \(\S+\) waits in .*collective"
_LEFT = r"at the end of its script, sys\.exit\(0\) at \S+faulty_script\.py:\d+"


@dataclass(frozen=True)
class Case:
    """What a function of the script does on one rank, and what has to come of it."""

    what: str
    code: int
    said: tuple[str, ...]
    """Patterns, each of a line; {rank} is the one with the fault."""
    ended_s: float = 5.0
    """From the fault to the end of the last process, at most."""

    @property
    def hangs(self) -> bool:
        return self.code == 124


def _hang(what: str, *said: str, ended_s: float = HANG_TIMEOUT_S + 14.0) -> Case:
    return Case(what, 124, said, ended_s)


CASES = {
    "SIGSTOP": _hang(
        "stops",
        r"rank {rank} \(\S+\) gave no sign of life",
        _WAITS,
        ended_s=HANG_TIMEOUT_S + 20.0,  # horovodrun waits 10 s for a process that is stopped
    ),
    "endless loop": _hang("loops", r"rank {rank} \(\S+\) did not come: in callbacks at step 3, faulty_script", _WAITS),
    "blocked reader": _hang("reads_no_more", r"rank {rank} \(\S+\) did not come: loading data at step 13, fa", _WAITS),
    "extra collective": _hang(
        "exchanges_alone", r"rank {rank} \(\S+\) waits in the collective \S*one_too_many\S* at step 3", _WAITS
    ),
    "missing collective": _hang(
        "leaves_one_out",
        r"rank {other} \(\S+\) waits in the collective \S*left_out\S* at step 3",
        r"rank {rank} \(\S+\) wai",
    ),
    "exception": Case("raises", 1, (r"rank {rank} \(\S+\) failed", "ValueError: a mistake")),
    "sys.exit(3)": Case("exits", 3, (r"called sys\.exit\(3\) at \S+faulty_script\.py:\d+",)),
    "SIGKILL": Case("is_killed", 137, (BY_LAUNCHER,)),
    "SIGSEGV": Case("crashes", 139, (BY_LAUNCHER,)),
    "os._exit": Case("leaves_at_once", 3, (BY_LAUNCHER,)),
}
"""The table's rows."""
MORE_CASES = {
    "C code": _hang("holds_the_lock", r"rank {rank} \(\S+\) gave no sign of life", _WAITS),
    "other branches": _hang(
        "goes_other_ways",
        r"ranks 0-1 wait in one of the collectives \S*in_the_branch\S*, \S*behind",
        "They wait in different collectives",
    ),
    "sys.exit(0)": _hang("exits_well", r"rank {rank} \(\S+\) did not come: " + _LEFT, _WAITS + r" \S*left_over"),
}
"""Hangs that are tested besides."""


@dataclass(frozen=True)
class Cell:
    """One case on one rank, under a launcher."""

    name: str
    rank: int
    controller: str

    @property
    def case(self) -> Case:
        return (CASES | MORE_CASES)[self.name]


@dataclass
class Played:
    """What became of a job."""

    cell: Cell
    code: int | None = None
    found_s: float | None = None
    """From the fault to the first line that tells of it."""
    ended_s: float = 0.0
    """From the fault to the end of the last process."""
    text: str = ""
    problems: list[str] = field(default_factory=list)


def cells(names: Sequence[str] = ()) -> list[Cell]:
    """Return the cells of the table's rows, of all by default."""
    return [
        Cell(name=name, rank=rank, controller=controller)
        for name in names or CASES
        for rank in (0, 1)
        for controller in _CONTROLLERS
    ]


def play_cell(cell: Cell, folder: Path, *, hang_timeout_s: float = HANG_TIMEOUT_S, patience_s: float = 0.0) -> Played:
    """Start the job of a cell, and see how it ends.

    Args:
        cell: what happens to which rank.
        folder: where the job is started.
        hang_timeout_s: of the job.
        patience_s: seconds by which it may be found and ended later than on an idle machine.
    """
    case = cell.case
    words = [sys.executable, str(SCRIPT), case.what, str(cell.rank), str(hang_timeout_s)]
    with Job([*launcher(cell.controller, 2), *words], folder) as job:
        code = job.wait(_LAUNCH_S)
        left = job.wait_for_processes() if code is not None else set()
        ended, text = time.time(), job.text
        said = [pattern.format(rank=cell.rank, other=1 - cell.rank) for pattern in case.said]
        told = job.first("error: The job hangs" if case.hangs else said[0])
    struck = re.search(r"fault at ([\d.]+)", text)
    begun = float(struck[1]) if struck else float("nan")
    found = None if told is None else round(told - begun, 1)
    played = Played(cell, code, found, round(ended - begun, 1), text)
    played.problems = [*_mistakes(played, said, patience_s), *([f"{len(left)} processes are left"] if left else [])]
    return played


def _mistakes(played: Played, said: Sequence[str], patience_s: float) -> list[str]:
    case, text = played.cell.case, played.text
    ended_s, found_s = case.ended_s + patience_s, FOUND_S + patience_s
    problems = [f"nothing was said like: {pattern}" for pattern in said if not re.search(pattern, text)]
    if played.code != case.code:
        problems.append(f"ended with code {played.code}, not {case.code}")
    if not played.ended_s <= ended_s:
        problems.append(f"ended after {played.ended_s} s, not {ended_s:g} s")
    if case.hangs and text.count("error: The job hangs") != 1:
        problems.append("the hang was not told once")
    if case.hangs and not (played.found_s or 0.0) <= found_s:
        problems.append(f"found after {played.found_s} s, not {found_s:g} s")
    return problems


def matrix_table(played: Sequence[Played]) -> str:
    """Return a table in Markdown: seconds to the message and to the end, and the exit code."""
    found = {each.cell: each for each in played}
    names, ranks, controllers = (
        list(dict.fromkeys(getattr(each, what) for each in found)) for what in ("name", "rank", "controller")
    )
    columns = [(rank, controller) for controller in controllers for rank in ranks]
    heads = [f"{controller}, rank {rank}" for rank, controller in columns]
    lines = [f"| seconds found / ended, code | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name in names:
        entries = [_entry(found[Cell(name=name, rank=rank, controller=controller)]) for rank, controller in columns]
        lines.append(f"| {name} | {' | '.join(entries)} |")
    return "\n".join(lines)


def _entry(played: Played) -> str:
    found = "-" if played.found_s is None else f"{max(0.0, played.found_s):.1f}"
    wrong = " **wrong**" if played.problems else ""
    return f"{found} / {played.ended_s:.1f}, {played.code}{wrong}"
