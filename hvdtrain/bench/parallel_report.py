"""The part of a report about layouts of ranks. No TensorFlow."""

from collections.abc import Iterator, Mapping, Sequence

from hvdtrain.bench import plots
from hvdtrain.bench.document import Block, Code, Figure, Heading, Paragraph, Table
from hvdtrain.bench.layouts import APART, BASELINE, FORMULA, MODELS, ONE, sent_mb
from hvdtrain.bench.noise import Spread, spread
from hvdtrain.bench.results import LayoutCell, LayoutRound, ParallelResults

_HOW = (
    "The layouts of a number of ranks took turns, A B C and then C B A, each launch in fresh processes, with the batch "
    "of all ranks the same. A launch's time is its median step; reported are the median over the launches, its "
    "quartiles, and the medians of its ratios in the same round: to data parallelism; to the time of one process on "
    "the cores of one rank, divided by the ranks; and to ranks side by side that exchange nothing, since cores may "
    "share memory bandwidth, clock or more. Memory is the peak of resident memory of the rank that needs most."
)
_NOTHING = "-"


def parallel_report(results: ParallelResults) -> Iterator[Block]:
    """Yield the blocks about layouts."""
    yield Heading("Layouts of ranks")
    yield Code(results.command)
    yield Paragraph(_HOW)
    yield Paragraph(FORMULA)
    for group in _groups(results.cells):
        measured = [cell for cell in group if cell.rounds]
        yield Heading(_title(group[0]), 3)
        yield _table(measured)
        if measured:
            yield Figure(_picture(measured), "time of a step and peak memory of each layout")
    skipped = [[_title(cell), cell.layout, cell.skipped] for cell in results.cells if cell.skipped is not None]
    if skipped:
        yield Heading("Layouts that were not measured", 3)
        yield Table(["", "layout", "reason"], skipped, texts=3)
    yield Heading("To repeat a launch of a layout", 3)
    yield Code("\n".join(cell.command for cell in results.cells))


def _groups(cells: Sequence[LayoutCell]) -> list[list[LayoutCell]]:
    groups: dict[str, list[LayoutCell]] = {}
    for cell in cells:
        groups.setdefault(_title(cell), []).append(cell)
    return list(groups.values())


def _title(cell: LayoutCell) -> str:
    return f"{cell.model} ({MODELS[cell.model].about}), {cell.ranks} ranks over {cell.controller}"


def _table(cells: Sequence[LayoutCell]) -> Table:
    columns = [
        "layout",
        "ms a step",
        "quartiles",
        f"time / {BASELINE}",
        f"time / share of {ONE}",
        f"time / {APART}",
        "peak MiB",
        f"less than {BASELINE}",
    ]
    columns += ["MB sent, formula", "counted", "rounds"]
    named = {cell.layout: cell for cell in cells}
    return Table(columns, [_row(cell, named) for cell in cells])


def _row(cell: LayoutCell, named: Mapping[str, LayoutCell]) -> list[str]:
    times, peak = _times(cell), spread([taken.peak_mib for taken in cell.rounds]).median
    pairs = _pairs(cell, named.get(BASELINE))
    share = _ratio(cell, named.get(ONE))
    less = spread([theirs.peak_mib - mine.peak_mib for mine, theirs in pairs]).median if pairs else None
    formula = sent_mb(cell.layout, cell.model, cell.ranks, cell.parameters or 0)
    counted = [taken.sent_mb for taken in cell.rounds if taken.sent_mb is not None]
    return [
        *(cell.layout, f"{times.median:.1f}", f"{times.low:.1f} .. {times.high:.1f}"),
        _shown(_ratio(cell, named.get(BASELINE)), 2),
        _shown(cell.ranks * share if share is not None and cell.layout != ONE else None, 2),
        _shown(_ratio(cell, named.get(APART)), 2),
        *(f"{peak:.0f}", _shown(less, 0), _shown(formula, 1)),
        *(_shown(spread(counted).median if counted else None, 1), str(len(cell.rounds))),
    ]


def _ratio(cell: LayoutCell, other: LayoutCell | None) -> float | None:
    """Return the median ratio of the times of a layout and another one in the same rounds."""
    pairs = _pairs(cell, other)
    return spread([mine.step_ms / theirs.step_ms for mine, theirs in pairs]).median if pairs else None


def _pairs(cell: LayoutCell, other: LayoutCell | None) -> list[tuple[LayoutRound, LayoutRound]]:
    return list(zip(cell.rounds, other.rounds, strict=False)) if other is not None else []


def _times(cell: LayoutCell) -> Spread:
    return spread([taken.step_ms for taken in cell.rounds])


def _shown(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _picture(cells: Sequence[LayoutCell]) -> bytes:
    memory = [spread([taken.peak_mib for taken in cell.rounds]).median for cell in cells]
    return plots.bars([cell.layout for cell in cells], {"ms a step": [_times(c).median for c in cells], "MiB": memory})
