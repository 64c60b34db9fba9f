"""Throughput, ratios, efficiencies, bytes on the wire, and the report of a comparison of steps. No TensorFlow."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdtrain.bench import plots
from hvdtrain.bench.report import Block, Code, Figure, Heading, Paragraph, Table, repeated, skipped_runs, titled
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
    spread,
)
from hvdtrain.bench.suite import IDEAL, SIDES, Traffic, side

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
    ideal = _ideal(run, runs, whole)
    same = (other for other in runs if other.name == baseline and other.setting == run.setting)
    parts: list[Mapping[str, float]] = run.figure("breakdown_ms")
    return Figures(
        step_ms=times,
        rate=Spread(*(1000.0 * batch / time for time in (times.high, times.median, times.low))),
        ideal_rate=None if ideal is None else 1000.0 * ranks * whole / spread(ideal.medians("windows_ms")).median,
        ratio=_ratio(run, next(same, None), f"{baseline} was not measured"),
        strong=_efficiency(run, runs, whole),
        weak=_efficiency(run, runs, whole // ranks),
        sent_bytes=_sent(run, runs),
        breakdown_ms={part: float(np.median([one[part] for one in parts])) for part in parts[0]} if parts else None,
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


def _ideal(run: Run, runs: Sequence[Run], batch: int) -> Run | None:
    wanted = IDEAL, run.setting["model"], run.setting["precision"], batch
    keys = ("model", "precision", "batch")
    same = (other for other in runs if (other.name, *(other.setting[key] for key in keys)) == wanted)
    return next(same, None)


def _efficiency(run: Run, runs: Sequence[Run], batch: int) -> Ratio:
    """Return the throughput relative to the ideal on `batch` samples, formed per round."""
    samples = run.setting["batch"], run.setting["ranks"] * batch
    missing = f"{IDEAL} was not measured on {batch} samples"
    return _ratio(run, _ideal(run, runs, batch), missing, samples=samples)


def _sent(run: Run, runs: Sequence[Run]) -> float | None:
    this, setting = side(run.name), run.setting
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
    others = [row for row in rows if row[0].name != IDEAL]
    groups = [[row for row in others if row[0].setting == setting] for setting in _settings(others)]
    yield Heading("Training steps")
    yield Code(comparison.command)
    yield Paragraph(HOW.format(**options))
    yield Paragraph(NOISE)
    yield Paragraph(EFFICIENCY)
    yield from _pictures(groups)
    yield from _ideals([row for row in rows if row[0].name == IDEAL])
    for group in groups:
        yield Heading(titled(group[0][0].setting), 3)
        yield _table(group, options["baseline"])
        yield from _refusals(group)
    yield from _parts([(run, known.breakdown_ms) for run, known in rows if known.breakdown_ms is not None])
    yield Heading("Bytes on the wire", 3)
    yield Paragraph(WIRE)
    yield from skipped_runs(comparison.runs)
    yield from repeated(runs)
    settings = {run.name: run.facts.get("settings", {}) for run in runs}
    words = [[name, ", ".join(f"{k} {v}" for k, v in known.items())] for name, known in settings.items()]
    yield Table(["side", "what its processes run with"], words, texts=2)
    used = dict.fromkeys(run.name for run in comparison.runs)
    yield Table(["side", "what it is"], [[name, SIDES[name].about] for name in used], texts=2)


def _settings(rows: Sequence[Row]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for run, _ in rows:
        if run.setting not in found:
            found.append(run.setting)
    return found


def _pictures(groups: Sequence[Sequence[Row]]) -> Iterator[Block]:
    panels = [
        plots.Panel(titled(group[0][0].setting), {run.name: known.rate for run, known in group}, group[0][1].ideal_rate)
        for group in groups
    ]
    if panels:
        line = "the line is what as many processes reach that exchange nothing (n times one-core)"
        yield Figure(plots.throughput(panels), f"samples a second, with the quartiles over the rounds; {line}")
    models: dict[str, tuple[dict[str, list[Any]], dict[str, list[Any]]]] = {}
    for run, known in (row for group in groups for row in group):
        for number, share in enumerate((known.strong, known.weak)):
            if run.setting["ranks"] > 1:
                curves = models.setdefault(run.setting["model"], ({}, {}))[number]
                if isinstance(share, Spread):
                    curves.setdefault(_label(run), []).append((run.setting["ranks"], share))
    if any(curves for both in models.values() for curves in both):
        yield Figure(plots.efficiency(models), "scaling efficiency over ranks; what was too noisy is missing")


def _label(run: Run) -> str:
    precision, count = run.setting["precision"], run.setting["accumulate"]
    return run.name + f" {precision}" * (precision != "float32") + f" K={count}" * (count > 1)


def _ideals(rows: Sequence[Row]) -> Iterator[Block]:
    """Yield the results of one process."""
    if rows:
        yield Heading("One process: the ideal", 3)
        columns = ["", "ms a step", "quartiles", "samples/s", "CPU s a step", "peak RSS MiB", "parameters", "rounds"]
        yield Table(
            columns,
            [
                [
                    titled(run.setting),
                    *_times(known),
                    *_resources(run),
                    f"{run.facts.get('parameters') or 0:,}",
                    str(len(run.rounds)),
                ]
                for run, known in rows
            ],
        )


def _times(known: Figures) -> list[str]:
    times = known.step_ms
    return [f"{times.median:.2f}", f"{times.low:.2f} .. {times.high:.2f}", f"{known.rate.median:.1f}"]


def _resources(run: Run) -> list[str]:
    peak = max(max(values) for values in run.figure("peak_rss_mib"))
    return [f"{np.median(run.figure('cpu_s')):.3f}", f"{peak:.0f}"]


def _table(members: Sequence[Row], baseline: str) -> Table:
    columns = ["side", "ms a step", "quartiles", "samples/s", f"time / {baseline}", "strong", "weak", "CPU s a step"]
    columns += ["in the kernel", "page faults a step", "peak RSS MiB", "MB sent a step", "rounds"]
    rows = []
    for run, known in members:
        kernel, faults = run.figure("kernel_share"), run.figure("page_faults")
        cpu_s, peak = _resources(run)
        rows.append(
            [
                *(run.name, *_times(known)),
                *(_formatted(share) for share in (known.ratio, known.strong, known.weak)),
                *(cpu_s, f"{np.median(kernel):.0%}" if kernel else NOTHING),
                *(f"{np.median(faults):,.0f}" if faults else NOTHING, peak),
                NOTHING if known.sent_bytes is None else f"{known.sent_bytes / 1e6:.2f}",
                str(len(run.rounds)),
            ]
        )
    return Table(columns, rows)


def _formatted(share: Ratio) -> str:
    return f"{share.median:.3f} ({share.low:.3f} .. {share.high:.3f})" if isinstance(share, Spread) else NOTHING


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
    if not known:
        return
    known = [(run, {name: parts[name] for name in PARTS}) for run, parts in known]
    yield Heading("Where a step's time goes", 3)
    yield Paragraph(BREAKDOWN)
    drawn = {f"{titled(run.setting)}\n{run.name}": parts for run, parts in known}
    yield Figure(plots.shares("Where a step's time goes", drawn), "parts of a step")
    table = [[titled(run.setting), run.name, *(f"{value:.2f}" for value in parts.values())] for run, parts in known]
    yield Table(["", "side", *(f"{name}, ms" for name in PARTS)], table, texts=2)
