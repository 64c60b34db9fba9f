"""The comparison of collectives: engines take turns, each launch in fresh processes. No TensorFlow."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from hvdtrain.bench.bandwidth import ADD
from hvdtrain.bench.engines import engine
from hvdtrain.bench.launching import LaunchFailed, ask, launcher, shown
from hvdtrain.bench.results import EngineRun, Series
from hvdtrain.bench.suite import Ask
from hvdtrain.bench.timing import WORD


def command_of(name: str, collectives: Sequence[str], sizes: Sequence[int], ranks: int) -> list[str]:
    """Return the command that launches the engine `name` once."""
    this = engine(name)
    chosen = [one for one in this.collectives if one in collectives or one == ADD]
    words = [*launcher(this.launcher, ranks), sys.executable, "-m", "hvdtrain", "bench", "engine", name]
    return [*words, "--collectives", *chosen, "--sizes", *map(str, sizes)]


def run_collectives(
    names: Sequence[str],
    collectives: Sequence[str],
    sizes: Sequence[int],
    *,
    ranks: int,
    rounds: int,
    limit_s: float,
    log: Callable[[str], None],
    ask_for: Ask | None = None,
) -> tuple[list[EngineRun], list[Series]]:
    """Measure every engine in every round, A B C then C B A; an engine that fails is not started again."""
    answered = ask_for or (lambda words: ask(words, WORD, limit_s=limit_s))
    commands = {name: command_of(name, collectives, sizes, ranks) for name in names}
    runs = {name: EngineRun(engine=name, command=shown(command)) for name, command in commands.items()}
    series: dict[tuple[str, str, int], Series] = {}
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            if "all" not in runs[name].skipped:
                runs[name] = _with_round(runs[name], commands[name], answered, series)
                log(f"round {number + 1}  {name:14} {_outcome(runs[name])}")
    return list(runs.values()), sorted(series.values(), key=lambda one: names.index(one.engine))


def _with_round(
    run: EngineRun, command: Sequence[str], answered: Ask, series: dict[tuple[str, str, int], Series]
) -> EngineRun:
    try:
        answer = answered(command)
    except LaunchFailed as error:
        return replace(run, skipped={"all": str(error)})
    for row in answer.value["series"]:
        key = run.engine, row["collective"], row["bytes"]
        known = series.get(key) or Series(engine=key[0], collective=key[1], bytes=key[2], times_ms=[])
        series[key] = replace(known, times_ms=[*known.times_ms, row["ms"]])
    return replace(
        run,
        settings=answer.value["settings"],
        skipped=answer.value["skipped"],
        foreign_cores=[*run.foreign_cores, answer.foreign_cores],
    )


def _outcome(run: EngineRun) -> str:
    reasons = [reason if what == "all" else f"{what}: {reason}" for what, reason in run.skipped.items()]
    return "not measured: " + "; ".join(reasons) if reasons else "measured"
