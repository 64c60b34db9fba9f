"""Comparison of two results. No TensorFlow."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hvdtrain.bench.bandwidth import shown_size
from hvdtrain.bench.document import Block, Heading, Paragraph, Table
from hvdtrain.bench.noise import LEAST_ROUNDS, spread
from hvdtrain.bench.plots import titled
from hvdtrain.bench.results import Cell, Results, Series
from hvdtrain.bench.statistics import setting, step_times

RULE = (
    "The two were not measured in turn, so that a machine that was slower on one day looks like a change. Reported "
    f"is a change where the quartiles of the two do not overlap and both have at least {LEAST_ROUNDS} rounds."
)


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Return whether times changed: `slower`, `faster`, `within the spread`, or why that is unknown."""
    if min(len(before), len(after)) < LEAST_ROUNDS:
        return "too few rounds"
    a, b = spread(before), spread(after)
    if b.low > a.high:
        return "slower"
    return "faster" if b.high < a.low else "within the spread"


def compared(before: Results, after: Results) -> Iterator[Block]:
    """Yield the changes as blocks of a report."""
    yield Heading(f"From {before.date}, {before.host_class} to {after.date}, {after.host_class}", 1)
    changed = [[name, a, b] for name, a, b in differences(before.environment, after.environment)]
    yield Table(["machine, versions and variables that differ", "before", "after"], changed or [["none", "", ""]], 3)
    yield Paragraph(RULE)
    cells = _pairs(_cells(before), _cells(after), lambda cell: (cell.side, *setting(cell)))
    yield from _times("Training steps", cells, lambda cell: [cell.side, titled(cell)], step_times)
    series = _pairs(_series(before), _series(after), lambda one: (one.engine, one.collective, one.bytes))
    yield from _times(
        "Collectives",
        series,
        lambda one: [one.engine, f"{one.collective}, {shown_size(one.bytes)}"],
        lambda one: one.times_ms,
    )


def _cells(results: Results) -> list[Cell]:
    return [] if results.suite is None else [cell for cell in results.suite.cells if cell.rounds]


def _series(results: Results) -> list[Series]:
    return [] if results.collectives is None else results.collectives.series


def _pairs(before: Sequence[Any], after: Sequence[Any], key: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """Pair items of both sides by key; None if one is missing."""
    old, new = ({key(one): one for one in some} for some in (before, after))
    return [(old.get(name), new.get(name)) for name in dict.fromkeys([*old, *new])]


def _times(
    title: str,
    pairs: Sequence[tuple[Any, Any]],
    names: Callable[[Any], list[str]],
    times: Callable[[Any], Sequence[float]],
) -> Iterator[Block]:
    if not pairs:
        return
    yield Heading(title)
    rows = []
    for old, new in pairs:
        row = names(old or new)
        row += ["-" if one is None else f"{spread(times(one)).median:.4g}" for one in (old, new)]
        if old is None or new is None:
            row += ["-", "only after" if old is None else "only before"]
        else:
            row += [f"{spread(times(new)).median / spread(times(old)).median:.3f}", verdict(times(old), times(new))]
        rows.append(row)
    yield Table(["", "", "ms before", "ms after", "after / before", "change"], rows, texts=2)


def differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (name, before, after) of the differences of two nested dicts."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if key != "available_memory_gib":
                yield from differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    elif before != after:
        yield name, str(before), str(after)
