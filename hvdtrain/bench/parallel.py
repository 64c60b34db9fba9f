"""The comparison of layouts of ranks: they take turns, each in launches of its own. No TensorFlow."""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.bench.launching import Answer, LaunchFailed, ask, launcher, shown
from hvdtrain.bench.layouts import processes, words_of
from hvdtrain.bench.results import LayoutCell, LayoutRound
from hvdtrain.bench.timing import WORD

PEAKS = "peaks.jsonl"
"""The file in a run's folder to which each rank adds its peak of memory."""
LAUNCHERS = {"mpi": "mpirun", "gloo": "gloo"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared."""

    model: str
    ranks: Sequence[int]
    layouts: dict[int, list[str]]
    """By the number of ranks."""
    controllers: Sequence[str]
    rounds: int
    steps: int
    limit_s: float


def run_layouts(
    compared: Comparison,
    *,
    log: Callable[[str], None],
    keep: Callable[[list[LayoutCell]], None],
    ask_for: Callable[[Sequence[str]], Answer] | None = None,
) -> list[LayoutCell]:
    """Measure all layouts in turn, and return the results.

    A layout that fails is not started again; its earlier rounds and the reason are kept.

    Args:
        compared: the layouts, and how they are launched.
        log: receives a line of progress per launch.
        keep: receives all results so far, after each round.
        ask_for: runs a command; by default on this machine.
    """
    answered = ask_for or (lambda words: ask(words, WORD, limit_s=compared.limit_s))
    cells = {}
    for controller in compared.controllers:
        for ranks in compared.ranks:
            for layout in compared.layouts[ranks]:
                command = shown(
                    _command(layout, controller=controller, ranks=ranks, compared=compared, folder=Path("run"))
                )
                cells[controller, ranks, layout] = LayoutCell(
                    layout=layout, model=compared.model, controller=controller, ranks=ranks, command=command
                )
            keys = [(controller, ranks, layout) for layout in compared.layouts[ranks]]
            for number in range(compared.rounds):
                for key in keys if number % 2 == 0 else reversed(keys):
                    if cells[key].skipped is None:
                        cells[key] = _with_round(cells[key], compared, answered)
                        log(_line(number, cells[key]))
                keep(list(cells.values()))
    return list(cells.values())


def _command(layout: str, controller: str, ranks: int, compared: Comparison, folder: Path) -> list[str]:
    words = words_of(layout, model=compared.model, ranks=ranks, steps=compared.steps, folder=folder)
    count = processes(layout, ranks)
    started = launcher(LAUNCHERS[controller] if count > 1 else "none", count)
    return [*started, sys.executable, "-m", "hvdtrain", "bench", "layout", *words]


def _with_round(cell: LayoutCell, compared: Comparison, answered: Callable[[Sequence[str]], Answer]) -> LayoutCell:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        try:
            answer = answered(
                _command(cell.layout, controller=cell.controller, ranks=cell.ranks, compared=compared, folder=folder)
            )
        except LaunchFailed as error:
            return replace(cell, skipped=str(error))
        peaks = [json.loads(line) for line in (folder / PEAKS).read_text(encoding="utf-8").splitlines()]
    found = answer.value
    counted = cell.controller == "gloo" and processes(cell.layout, cell.ranks) > 1
    sent = found["sent_bytes"] / 1e6 if counted and found["sent_bytes"] is not None else None
    taken = LayoutRound(found["step_ms"], max(peaks), sent, answer.foreign_cores)
    return replace(cell, parameters=found["parameters"], rounds=[*cell.rounds, taken])


def _line(number: int, cell: LayoutCell) -> str:
    place = f"round {number + 1}  {cell.model} {cell.controller} {cell.ranks} ranks  {cell.layout}"
    if cell.skipped is not None:
        return f"{place}  failed: {cell.skipped}"
    last = cell.rounds[-1]
    return f"{place}  {last.step_ms:.1f} ms, {last.peak_mib:.0f} MiB"
