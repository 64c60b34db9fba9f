"""Throughput, ratios, efficiencies, bytes on the wire, and the report of a comparison of steps. No TensorFlow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.bench import plots
from hvdtrain.bench.report import Block, Code, Figure, Heading, Paragraph, Table, closing, quartiles, titled
from hvdtrain.bench.results import (
    LEAST_ROUNDS,
    MOST_FOREIGN,
    NOTHING,
    WIDEST,
    Comparison,
    Refused,
    Run,
    Spread,
    ratio,
    shown,
    spread,
)
from hvdtrain.bench.suite import IDEAL, SIDES, Traffic

HOW = (
    "All sides of a model and precision took turns, A B C and then C B A, each launch in fresh processes. A rank has "
    "{cores} of the machine's cores to itself and as many threads (with more ranks than cores: one thread, unpinned). "
    "A launch takes windows of steps, {warm_up} to warm up and then {windows} that count; its figure is their median, "
    "on rank 0. Reported are the median over the launches (the rounds: {rounds}) and its quartiles."
)
NOISE = (
    f"A ratio is formed round by round. It is not reported with fewer than {LEAST_ROUNDS} rounds, where its quartiles "
    f"lie more than {WIDEST:.0%} of its median apart, or where other programs took more than {MOST_FOREIGN} cores' "
    "worth of time meanwhile (the processor time of the whole machine less that of the launch)."
)
EFFICIENCY = (
    "Efficiency: samples a second over n times those of one process on one rank's cores that does the arithmetic alone "
    "(one-core). Strong: the one process takes what all ranks take in a step; weak: what one rank takes. With K "
    "microbatches both are counted for one of them."
)
BREAKDOWN = (
    "Variants of hvdtrain's step take turns in the same processes: the whole step; the same on one batch again and "
    "again (the difference is input); without the exchange, on all ranks at once (exchange); without the update either "
    "(update); what remains is forward and backward pass. What overlaps counts only as far as it makes the step "
    "longer. Noisy differences can be negative. The hand-written loops and tf.distribute's strategies cannot be taken "
    "apart so."
)
WIRE = (
    "Bytes that a process sends for the gradients of one step, by formula and not measured; n processes. Ring "
    "all-reduce of S bytes: 2 (n - 1) / n S (Patarasuk and Yuan 2009), which is the least any algorithm can send; MPI "
    "may choose another. Rows of embeddings that are gathered: (n - 1) times a process's own rows with their indices, "
    "duplicates counted. hvdtrain reduces tables of up to 64 KB, and larger ones where that is less; a plain loop "
    "gathers always. Parameter server: a worker receives S and sends S, of sparse gradients rows alone. Replicas "
    "within one process send nothing."
)
SMALL_TABLE_BYTES = 64 * 1024
"""Tables up to this size are sent dense (hvdtrain/gradients/sparse.py)."""

PARTS = ("forward and backward", "exchange", "update", "input")

Ratio = Spread | Refused


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The reported figures of one run."""

    step_ms: Spread
    """Spread over the rounds of each launch's median window."""
    rate: Spread
    """Samples per second over all ranks, from the step times."""
    ideal_rate: float | None
    """Ideal samples per second: n times the throughput of one process without exchange; None if not measured."""
    ratio: Ratio
    """Step time relative to the baseline, which took turns with it."""
    strong: Ratio
    weak: Ratio
    sent_bytes: float | None
    """Bytes sent by a process per step, by formula; None if replicas share a process, or unknown."""
    breakdown_ms: dict[str, float] | None


Row = tuple[Run, Figures]


def figures(run: Run, runs: Sequence[Run], baseline: str) -> Figures:
    """Compute the figures of `run`, relative to the other runs that were measured."""
    times, batch, ranks = spread(run.medians("windows_ms")), run.setting["batch"], run.setting["ranks"]
    whole = batch // run.setting["accumulate"]

    def ideal(samples: int) -> Run | None:
        wanted = {"model": run.setting["model"], "precision": run.setting["precision"], "batch": samples}
        return next((other for other in runs if other.name == IDEAL and wanted.items() <= other.setting.items()), None)

    def efficiency(samples: int) -> Ratio:
        missing = f"{IDEAL} was not measured on {samples} samples"
        return _ratio(run, ideal(samples), missing, samples=(batch, ranks * samples))

    alone = ideal(whole)
    same = (other for other in runs if other.name == baseline and other.setting == run.setting)
    parts: list[Mapping[str, float]] = run.figure("breakdown_ms")
    return Figures(
        step_ms=times,
        rate=Spread(*(1000.0 * batch / time for time in (times.high, times.median, times.low))),
        ideal_rate=None if alone is None else 1000.0 * ranks * whole / spread(alone.medians("windows_ms")).median,
        ratio=_ratio(run, next(same, None), f"{baseline} was not measured"),
        strong=efficiency(whole),
        weak=efficiency(whole // ranks),
        sent_bytes=_sent(run, runs),
        breakdown_ms={part: float(np.median([one[part] for one in parts])) for part in PARTS} if parts else None,
    )


def _ratio(run: Run, other: Run | None, missing: str, *, samples: tuple[int, int] | None = None) -> Ratio:
    """Return the ratio of the times of two runs, or, with the samples of each, that of their throughput."""
    if other is None:
        return Refused(missing)
    if other is run:
        return Spread(1.0, 1.0, 1.0)
    mine, theirs = run.medians("windows_ms"), other.medians("windows_ms")
    if samples is not None:
        mine, theirs = [samples[0] / time for time in mine], [samples[1] / time for time in theirs]
    return ratio(mine, theirs, [one.foreign_cores for each in (run, other) for one in each.rounds])


def _sent(run: Run, runs: Sequence[Run]) -> float | None:
    this, setting = SIDES[run.name], run.setting
    known = (other.facts.get("gradients") for other in runs if other.setting["model"] == setting["model"])
    gradients = next((each for each in known if each is not None), None)
    processes = this.processes(setting["ranks"])
    if gradients is None or processes == 1:
        return None
    # Microbatches add up dense gradients; of sparse ones each row is counted.
    samples = this.share(setting["batch"], setting["ranks"])
    return sent_bytes(gradients, traffic=this.traffic, processes=processes, samples=samples, gathers=this.by_hand)


def sent_bytes(
    gradients: Sequence[Mapping[str, Any]], *, traffic: Traffic, processes: int, samples: int, gathers: bool
) -> float | None:
    """Return the bytes that one process sends in a step; see `WIRE`. None if replicas share a process.

    Args:
        gradients: sizes, as `PlainLoop.gradient_sizes` returns them.
        traffic: how they travel.
        processes: number of processes, n.
        samples: samples of a process per step, which determine the rows of embeddings touched.
        gathers: whether rows are always gathered, as in a plain loop.
    """

    def sent(gradient: Mapping[str, Any]) -> float:
        whole: float = gradient["bytes"]
        per_sample = gradient.get("rows_per_sample")
        rows = None if per_sample is None else per_sample * samples * gradient["row_bytes"]
        if traffic == "server":
            return whole if rows is None else min(whole, rows)
        dense = 2.0 * (processes - 1) / processes * whole
        if rows is None or (whole <= SMALL_TABLE_BYTES and not gathers):
            return dense
        gathered: float = (processes - 1) * rows
        return gathered if gathers else min(gathered, dense)

    return None if traffic == "none" else sum(map(sent, gradients))


# -- the report --


def section(comparison: Comparison) -> Iterator[Block]:
    """Yield the blocks about a comparison of steps."""
    options, runs = comparison.options, [run for run in comparison.runs if run.rounds]
    rows = [(run, figures(run, runs, options["baseline"])) for run in runs]
    groups: dict[str, list[Row]] = {}
    for run, known in rows:
        groups.setdefault("" if run.name == IDEAL else titled(run.setting), []).append((run, known))
    ideals = {titled(row[0].setting): row for row in groups.pop("", [])}
    yield Heading("Training steps")
    yield Code(comparison.command)
    yield Paragraph(HOW.format(**options))
    yield Paragraph(NOISE)
    yield Paragraph(EFFICIENCY)
    yield from _pictures(groups)
    if ideals:
        yield Heading("One process: the ideal", 3)
        yield _table(ideals, options["baseline"])
    for title, group in groups.items():
        yield Heading(title, 3)
        yield _table({run.name: (run, known) for run, known in group}, options["baseline"])
        yield from _refusals(group)
    yield from _parts([(run, known.breakdown_ms) for run, known in rows if known.breakdown_ms is not None])
    yield Heading("Bytes on the wire", 3)
    yield Paragraph(WIRE)
    yield from closing(comparison.runs, {name: this.about for name, this in SIDES.items()})


def _pictures(groups: Mapping[str, Sequence[Row]]) -> Iterator[Block]:
    panels = [
        plots.Bars(title, {run.name: known.rate for run, known in group}, group[0][1].ideal_rate, "samples a second")
        for title, group in groups.items()
    ]
    if panels:
        line = "the line is what as many processes reach that exchange nothing (n times one-core)"
        yield Figure(plots.bars(panels), f"samples a second, with the quartiles over the rounds; {line}")
    models: dict[str, dict[str, dict[str, list[tuple[float, Spread]]]]] = {}
    for run, known in (row for group in groups.values() for row in group):
        setting = run.setting
        label = run.name + f" {setting['precision']}" * (setting["precision"] != "float32")
        label += f" K={setting['accumulate']}" * (setting["accumulate"] > 1)
        for kind, share in (("strong", known.strong), ("weak", known.weak)):
            curves = models.setdefault(setting["model"], {"strong": {}, "weak": {}})[kind]
            if isinstance(share, Spread) and setting["ranks"] > 1:
                curves.setdefault(label, []).append((setting["ranks"], share))
    drawn = [
        [plots.Curves(f"{model}, {kind} scaling", "ranks", curves) for kind, curves in both.items()]
        for model, both in models.items()
    ]
    if any(panel.curves for row in drawn for panel in row):
        yield Figure(plots.curves(drawn), "scaling efficiency over ranks; what was too noisy is missing")


def _table(rows: Mapping[str, Row], baseline: str) -> Table:
    columns = ["side", "ms a step", "quartiles", "samples/s", f"time / {baseline}", "strong", "weak", "CPU s a step"]
    columns += ["in the kernel", "page faults a step", "peak RSS MiB", "MB sent a step", "parameters", "rounds"]
    return Table(columns, [_row(name, *row) for name, row in rows.items()])


def _row(name: str, run: Run, known: Figures) -> list[str]:
    kernel, faults = run.figure("kernel_share"), run.figure("page_faults")
    shares = (quartiles(share, ".3f") for share in (known.ratio, known.strong, known.weak))
    return [
        *(name, *quartiles(known.step_ms, ".2f"), f"{known.rate.median:.1f}"),
        *(median if median == NOTHING else f"{median} ({around})" for median, around in shares),
        *(f"{np.median(run.figure('cpu_s')):.3f}", f"{np.median(kernel):.0%}" if kernel else NOTHING),
        f"{np.median(faults):,.0f}" if faults else NOTHING,
        f"{max(max(values) for values in run.figure('peak_rss_mib')):.0f}",
        shown(None if known.sent_bytes is None else known.sent_bytes / 1e6, 2),
        *(f"{run.facts['parameters']:,}" if "parameters" in run.facts else NOTHING, str(len(run.rounds))),
    ]


def _refusals(members: Sequence[Row]) -> Iterator[Block]:
    """Yield the reasons for missing figures, each once."""
    reasons: dict[str, list[str]] = {}
    for run, known in members:
        for name, share in (("ratio", known.ratio), ("strong", known.strong), ("weak", known.weak)):
            if isinstance(share, Refused):
                reasons.setdefault(share.reason, []).append(f"{run.name} {name}")
    if reasons:
        listed = "; ".join(f"{', '.join(what)} ({reason})" for reason, what in reasons.items())
        yield Paragraph(f"Not reported: {listed}.")


def _parts(known: Sequence[tuple[Run, Mapping[str, float]]]) -> Iterator[Block]:
    if known:
        yield Heading("Where a step's time goes", 3)
        yield Paragraph(BREAKDOWN)
        drawn = {f"{titled(run.setting)}\n{run.name}": parts for run, parts in known}
        yield Figure(plots.shares("Where a step's time goes", drawn), "parts of a step")
        rows = [[titled(run.setting), run.name, *(f"{value:.2f}" for value in parts.values())] for run, parts in known]
        yield Table(["", "side", *(f"{name}, ms" for name in PARTS)], rows, texts=2)
