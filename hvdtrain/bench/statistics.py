"""Statistics over the rounds: throughput, ratios, efficiencies; pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hvdtrain.bench.noise import Refused, Spread, ratio, spread
from hvdtrain.bench.results import Cell, SuiteResults
from hvdtrain.bench.sides import IDEAL, side
from hvdtrain.bench.wire import sent_bytes

Ratio = Spread | Refused

EFFICIENCY = (
    "Efficiency: samples a second over n times those of one process on one rank's cores that does the arithmetic alone "
    "(one-core). Strong: the one process takes what all ranks take in a step; weak: what one rank takes. With K "
    "microbatches both are counted for one of them."
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The reported figures of one cell."""

    step_ms: Spread
    """Spread over the rounds of each launch's median window."""
    samples_per_second: float
    """Samples per second over all ranks, from the median step time."""
    ideal_per_second: float | None
    """Ideal samples per second: n times the throughput of one process without exchange; None if not measured."""
    ratio: Ratio
    """Step time relative to the baseline, which took turns with it."""
    strong: Ratio
    weak: Ratio
    cpu_s: float
    """Median CPU seconds per step, over all ranks."""
    kernel_share: float | None
    """Median share of that time that the kernel took; None in results of earlier versions."""
    page_faults: float | None
    """Median page faults per step, over all ranks; None in results of earlier versions."""
    peak_rss_mib: float
    """Peak memory of the largest process in any round."""
    sent_bytes: float | None
    """Bytes sent by a process per step, by formula; None if replicas share a process, or unknown."""
    breakdown_ms: dict[str, float] | None


def step_times(cell: Cell) -> list[float]:
    """Return the median window of each round, in milliseconds per step."""
    return [float(np.median(one.windows_ms)) for one in cell.rounds]


def measured(results: SuiteResults) -> list[Cell]:
    """Return the cells with at least one round."""
    return [cell for cell in results.cells if cell.rounds]


def figures(cell: Cell, cells: Sequence[Cell], baseline: str) -> Figures:
    """Compute the figures of `cell`, relative to the other cells."""
    times, whole = spread(step_times(cell)), cell.batch // cell.accumulate
    ideal = _ideal(cell, cells, whole)
    return Figures(
        step_ms=times,
        samples_per_second=1000.0 * cell.batch / times.median,
        ideal_per_second=None if ideal is None else 1000.0 * cell.ranks * whole / spread(step_times(ideal)).median,
        ratio=_against(cell, _other(cells, cell, baseline), baseline),
        strong=_efficiency(cell, cells, whole),
        weak=_efficiency(cell, cells, whole // cell.ranks),
        cpu_s=float(np.median([one.cpu_s for one in cell.rounds])),
        kernel_share=_median([one.kernel_share for one in cell.rounds]),
        page_faults=_median([one.page_faults for one in cell.rounds]),
        peak_rss_mib=max(max(one.peak_rss_mib) for one in cell.rounds),
        sent_bytes=_sent(cell, cells),
        breakdown_ms=_breakdown(cell),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def setting(cell: Cell) -> tuple[str, int, int, str, int]:
    """Return the setting that two cells must share to be compared."""
    return cell.model, cell.ranks, cell.batch, cell.precision, cell.accumulate


def _other(cells: Sequence[Cell], cell: Cell, name: str) -> Cell | None:
    same = [other for other in cells if other.side == name and setting(other) == setting(cell) and other.rounds]
    return same[0] if same else None


def _foreign(*cells: Cell) -> list[float]:
    return [one.foreign_cores for cell in cells for one in cell.rounds]


def _against(cell: Cell, other: Cell | None, baseline: str) -> Ratio:
    if other is None:
        return Refused(f"{baseline} was not measured")
    if other is cell:
        return Spread(1.0, 1.0, 1.0)
    return ratio(step_times(cell), step_times(other), _foreign(cell, other))


def _ideal(cell: Cell, cells: Sequence[Cell], batch: int) -> Cell | None:
    wanted = IDEAL, cell.model, cell.precision, batch
    same = (other for other in cells if (other.side, other.model, other.precision, other.batch) == wanted)
    return next((other for other in same if other.rounds), None)


def _efficiency(cell: Cell, cells: Sequence[Cell], batch: int) -> Ratio:
    """Return the throughput relative to the ideal on `batch` samples, formed per round."""
    ideal = _ideal(cell, cells, batch)
    if ideal is None:
        return Refused(f"{IDEAL} was not measured on {batch} samples")
    if ideal is cell:
        return Spread(1.0, 1.0, 1.0)
    ours = [cell.batch / time for time in step_times(cell)]
    best = [cell.ranks * batch / time for time in step_times(ideal)]
    return ratio(ours, best, _foreign(cell, ideal))


def _sent(cell: Cell, cells: Sequence[Cell]) -> float | None:
    this = side(cell.side)
    known = next((c.gradients for c in cells if c.model == cell.model and c.gradients is not None), None)
    processes = this.processes(cell.ranks)
    if known is None or processes == 1:
        return None
    samples = this.share(cell.batch, cell.ranks)
    # Microbatches add up dense gradients; of sparse ones each row is counted.
    return sent_bytes(known, traffic=this.traffic, processes=processes, samples=samples, gathers=this.by_hand)


def _breakdown(cell: Cell) -> dict[str, float] | None:
    found: list[Mapping[str, float]] = [one.breakdown_ms for one in cell.rounds if one.breakdown_ms is not None]
    if not found:
        return None
    return {part: float(np.median([one[part] for one in found])) for part in found[0]}
