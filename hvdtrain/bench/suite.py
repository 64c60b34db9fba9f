"""The comparison of training steps: sides take turns, each launch in fresh processes. No TensorFlow."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.bench.launching import Answer, LaunchFailed, ask, launcher, shown
from hvdtrain.bench.plan import Point, turns
from hvdtrain.bench.results import Cell, GradientSize, Round
from hvdtrain.bench.sides import side
from hvdtrain.bench.timing import WORD
from hvdtrain.config.runtime import MallocName, RuntimeConfig

Ask = Callable[[Sequence[str]], Answer]


@dataclass(frozen=True, kw_only=True)
class Launching:
    """Launch options of all points."""

    rounds: int = 5
    windows: int = 5
    warm_up: int = 2
    steps: int | None = None
    """Steps of a window; None for each model's own."""
    cores: int = 1
    """Cores of each rank."""
    breakdown: bool = True
    malloc: MallocName = RuntimeConfig.malloc
    """Memory allocator of all sides."""
    limit_s: float = 900.0


def command_of(point: Point, how: Launching) -> list[str]:
    """Return the command that launches `point` once."""
    this = side(point.side)
    words = [*launcher(this.launcher, this.processes(point.ranks)), sys.executable, "-m", "hvdtrain", "bench", "side"]
    words += [point.side, point.model, "--batch", str(point.batch), "--ranks", str(point.ranks)]
    words += ["--precision", point.precision, "--accumulate", str(point.accumulate), "--cores", str(how.cores)]
    words += ["--windows", str(how.windows), "--warm-up", str(how.warm_up)]
    words += [] if how.steps is None else ["--steps", str(how.steps)]
    words += [] if how.malloc == RuntimeConfig.malloc else ["--malloc", how.malloc]
    return words + (["--breakdown"] if how.breakdown and not this.by_hand else [])


def empty_cell(point: Point, how: Launching, skipped: str | None = None) -> Cell:
    """Return the empty cell of a point, with the reason if it is skipped."""
    return Cell(**vars(point), command=shown(command_of(point, how)), skipped=skipped)


def run_suite(
    todo: Sequence[Point],
    refused: Mapping[Point, str],
    how: Launching,
    *,
    log: Callable[[str], None],
    keep: Callable[[list[Cell]], None],
    ask_for: Ask | None = None,
) -> list[Cell]:
    """Measure every point in every round and return the results.

    A side that fails is not started again; its earlier rounds and the reason are kept.

    Args:
        todo: points to run.
        refused: points that cannot run, with reasons.
        how: launch options.
        log: receives a line of progress per launch.
        keep: receives all cells so far, after each round of a model.
        ask_for: runs a command; by default on this machine.
    """
    answered = ask_for or (lambda words: ask(words, WORD, limit_s=how.limit_s))
    cells = {point: empty_cell(point, how) for point in todo}
    others = [empty_cell(point, how, reason) for point, reason in refused.items()]
    last: tuple[int, str] | None = None
    for number, point in turns(todo, how.rounds):
        if last not in (None, (number, point.model)):
            keep([*cells.values(), *others])
        last = number, point.model
        if cells[point].skipped is None:
            cells[point] = _with_round(cells[point], command_of(point, how), answered)
            log(_line(number, cells[point]))
    found = [*cells.values(), *others]
    keep(found)
    return found


def _with_round(cell: Cell, command: Sequence[str], answered: Ask) -> Cell:
    try:
        answer = answered(command)
    except LaunchFailed as error:
        return replace(cell, skipped=str(error))
    value: dict[str, Any] = dict(answer.value)
    gradients, parameters, settings = (value.pop(name, None) for name in ("gradients", "parameters", "settings"))
    return replace(
        cell,
        rounds=[*cell.rounds, Round(**value, foreign_cores=answer.foreign_cores)],
        settings=settings or {},
        parameters=parameters,
        gradients=None if gradients is None else [GradientSize(**size) for size in gradients],
    )


def _line(number: int, cell: Cell) -> str:
    share = side(cell.side).share(cell.batch, cell.ranks)
    what = f"round {number + 1}  {cell.model:9} {cell.side:22} {cell.ranks} x {share:<4}"
    extra = f" {cell.precision}" * (cell.precision != "float32") + f" accumulate {cell.accumulate}" * (
        cell.accumulate > 1
    )
    if cell.skipped is not None:
        return f"{what}{extra}  not measured: {cell.skipped}"
    windows = sorted(cell.rounds[-1].windows_ms)
    return f"{what}{extra}  {windows[len(windows) // 2]:9.2f} ms a step"
