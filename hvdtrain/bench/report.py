"""Writes report.md and report.html of a folder of results. No TensorFlow."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.bench import plots
from hvdtrain.bench.bandwidth import algorithm_bandwidth, bus_bandwidth, shown_size
from hvdtrain.bench.document import Block, Code, Figure, Heading, Paragraph, Table, to_html, to_markdown
from hvdtrain.bench.engines import ENGINES
from hvdtrain.bench.noise import LEAST_ROUNDS, MOST_FOREIGN, WIDEST, Refused, Spread, spread
from hvdtrain.bench.parallel_report import parallel_report
from hvdtrain.bench.results import CollectivesResults, Results, SuiteResults
from hvdtrain.bench.sides import IDEAL, SIDES
from hvdtrain.bench.statistics import EFFICIENCY, Figures, Ratio, figures, measured, setting
from hvdtrain.bench.wire import FORMULA
from hvdtrain.observability.summary import replace_file

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
BREAKDOWN = (
    "Variants of hvdtrain's step take turns in the same processes: the whole step; the same on one batch again and "
    "again (the difference is input); without the exchange, on all ranks at once (exchange); without the update either "
    "(update); what remains is forward and backward pass. What overlaps counts only as far as it makes the step "
    "longer. Noisy differences can be negative. The hand-written loops and tf.distribute's strategies cannot be taken "
    "apart so."
)
BANDWIDTH = (
    "Bandwidths as nccl-tests defines them (doc/PERFORMANCE.md there): with size S and time t the algorithm bandwidth "
    "is S / t, in GB/s of 1e9 bytes; the bus bandwidth is that times 2 (n - 1) / n for allreduce, (n - 1) / n for "
    "allgather, reducescatter and alltoall, 1 for broadcast, n ranks. S is what a rank gives; of allgather, what it "
    "gets. A time is the median of several calls back to back, on the slowest rank; reported is the median over the "
    "rounds, with quartiles. `memory` adds an array of S bytes to another on every rank at once: the least that "
    "reducing takes."
)
NOTHING = "-"


def write_report(results: Results, folder: Path) -> None:
    """Write report.md and report.html into the folder."""
    blocks = list(report(results))
    title = f"hvdtrain bench, {results.date}, {results.host_class}"
    for name, text in (("report.md", to_markdown(blocks)), ("report.html", to_html(blocks, title))):
        replace_file(folder / name, text)


def report(results: Results) -> Iterator[Block]:
    """Yield the report's blocks."""
    yield Heading(f"hvdtrain bench, {results.date}, {results.host_class}", 1)
    yield _host(results.environment)
    if results.suite is not None:
        yield from _suite(results.suite)
    if results.collectives is not None:
        yield from _collectives(results.collectives)
    if results.parallel is not None:
        yield from parallel_report(results.parallel)


def _host(environment: dict[str, Any]) -> Table:
    machine, packages = environment.get("machine", {}), environment.get("packages", {})
    facts = {
        "processor": f"{machine.get('cpu')}, {machine.get('usable_cores')} of {machine.get('cores')} cores usable",
        "memory": f"{machine.get('memory_gib')} GiB",
        "system": f"{machine.get('system')}, kernel {machine.get('kernel')}",
        "GPUs": ", ".join(environment.get("gpus") or []) or "none",
        "MPI": str((environment.get("mpi") or {}).get("mpirun")),
        "Python": str(environment.get("python", {}).get("version")),
        **{name: str(version) for name, version in packages.items() if version is not None},
        "variables": ", ".join(f"{k}={v}" for k, v in environment.get("variables", {}).items()) or "none",
    }
    return Table(["machine and versions", ""], [[name, value] for name, value in facts.items()], texts=2)


def _suite(suite: SuiteResults) -> Iterator[Block]:
    options, cells = suite.options, measured(suite)
    rows = [(cell, figures(cell, cells, options["baseline"])) for cell in cells]
    yield Heading("Training steps")
    yield Code(suite.command)
    yield Paragraph(HOW.format(**options))
    yield Paragraph(NOISE)
    yield Paragraph(EFFICIENCY)
    yield from _pictures(rows)
    yield from _ideals([row for row in rows if row[0].side == IDEAL])
    others = [row for row in rows if row[0].side != IDEAL]
    for group in dict.fromkeys(setting(cell) for cell, _ in others):
        members = [row for row in others if setting(row[0]) == group]
        yield Heading(plots.titled(members[0][0]), 3)
        yield _group(members, options["baseline"])
        yield from _refusals(members)
    yield from _parts(rows)
    yield Heading("Bytes on the wire", 3)
    yield Paragraph(FORMULA)
    yield from _skipped(suite)
    yield Heading("To repeat a launch", 3)
    yield Code("\n".join(cell.command for cell in cells))
    yield _settings(rows)
    used = dict.fromkeys(cell.side for cell in suite.cells)
    yield Table(["side", "what it is"], [[name, SIDES[name].about] for name in used], texts=2)


def _pictures(rows: Sequence[plots.Row]) -> Iterator[Block]:
    picture = plots.throughput(rows)
    if picture is not None:
        line = "the line is what as many processes reach that exchange nothing (n times one-core)"
        yield Figure(picture, f"samples a second, with the quartiles over the rounds; {line}")
    picture = plots.efficiency(rows)
    if picture is not None:
        yield Figure(picture, "scaling efficiency over ranks; what was too noisy is missing")


def _ideals(rows: Sequence[plots.Row]) -> Iterator[Block]:
    """Yield the results of one process."""
    if not rows:
        return
    yield Heading("One process: the ideal", 3)
    columns = ["", "ms a step", "quartiles", "samples/s", "CPU s a step", "peak RSS MiB", "parameters", "rounds"]
    table = [
        [
            *(plots.titled(cell), f"{known.step_ms.median:.2f}"),
            *(f"{known.step_ms.low:.2f} .. {known.step_ms.high:.2f}", f"{known.samples_per_second:.1f}"),
            *(f"{known.cpu_s:.3f}", f"{known.peak_rss_mib:.0f}", f"{cell.parameters or 0:,}", str(len(cell.rounds))),
        ]
        for cell, known in rows
    ]
    yield Table(columns, table)


def _group(members: Sequence[plots.Row], baseline: str) -> Table:
    columns = ["side", "ms a step", "quartiles", "samples/s", f"time / {baseline}", "strong", "weak", "CPU s a step"]
    columns += ["in the kernel", "page faults a step", "peak RSS MiB", "MB sent a step", "rounds"]
    rows = []
    for cell, known in members:
        sent = NOTHING if known.sent_bytes is None else f"{known.sent_bytes / 1e6:.2f}"
        times = known.step_ms
        rows.append(
            [
                *(cell.side, f"{times.median:.2f}", f"{times.low:.2f} .. {times.high:.2f}"),
                f"{known.samples_per_second:.1f}",
                *(_formatted(share) for share in (known.ratio, known.strong, known.weak)),
                f"{known.cpu_s:.3f}",
                NOTHING if known.kernel_share is None else f"{known.kernel_share:.0%}",
                NOTHING if known.page_faults is None else f"{known.page_faults:,.0f}",
                *(f"{known.peak_rss_mib:.0f}", sent, str(len(cell.rounds))),
            ]
        )
    return Table(columns, rows)


def _formatted(share: Ratio) -> str:
    return f"{share.median:.3f} ({share.low:.3f} .. {share.high:.3f})" if isinstance(share, Spread) else NOTHING


def _refusals(members: Sequence[plots.Row]) -> Iterator[Block]:
    """Yield the reasons for missing figures, each once."""
    reasons: dict[str, list[str]] = {}
    for cell, known in members:
        for name in ("ratio", "strong", "weak"):
            share = getattr(known, name)
            if isinstance(share, Refused):
                reasons.setdefault(share.reason, []).append(f"{cell.side} {name}")
    if reasons:
        yield Paragraph(
            "Not reported: " + "; ".join(f"{', '.join(what)} ({reason})" for reason, what in reasons.items()) + "."
        )


def _parts(rows: Sequence[plots.Row]) -> Iterator[Block]:
    known: list[tuple[plots.Row, dict[str, float]]] = [
        (row, row[1].breakdown_ms) for row in rows if row[1].breakdown_ms is not None
    ]
    picture = plots.breakdown(rows)
    if not known or picture is None:
        return
    yield Heading("Where a step's time goes", 3)
    yield Paragraph(BREAKDOWN)
    yield Figure(picture, "parts of a step")
    parts = list(plots.PART_COLOURS)
    table = [[plots.titled(row[0]), row[0].side, *(f"{values[part]:.2f}" for part in parts)] for row, values in known]
    yield Table(["", "side", *(f"{part}, ms" for part in parts)], table, texts=2)


def _skipped(suite: SuiteResults) -> Iterator[Block]:
    missing = [cell for cell in suite.cells if cell.skipped is not None]
    if missing:
        yield Heading("Not measured", 3)
        rows = [[cell.side, plots.titled(cell), f"{len(cell.rounds)}", cell.skipped or ""] for cell in missing]
        yield Table(["side", "", "rounds before", "reason"], rows, texts=4)


def _settings(rows: Sequence[tuple[Any, Figures]]) -> Table:
    found = {cell.side: cell.settings for cell, _ in rows}
    words = [[name, ", ".join(f"{k} {v}" for k, v in settings.items())] for name, settings in found.items()]
    return Table(["side", "what its processes run with"], words, texts=2)


def _collectives(results: CollectivesResults) -> Iterator[Block]:
    yield Heading(f"Collectives, {results.ranks} ranks")
    yield Code(results.command)
    yield Paragraph(BANDWIDTH)
    picture = plots.bandwidths(results)
    if picture is not None:
        yield Figure(picture, "time and bus bandwidth over the size, medians over the rounds")
    for name in dict.fromkeys(one.collective for one in results.series):
        yield Heading(name, 3)
        yield _bandwidths(results, name)
    skipped = [[run.engine, what, reason] for run in results.engines for what, reason in run.skipped.items()]
    if skipped:
        yield Heading("Collectives that were not measured", 3)
        yield Table(["engine", "what", "reason"], skipped, texts=3)
    yield Heading("To repeat a launch of collectives", 3)
    yield Code("\n".join(run.command for run in results.engines))
    about = [
        [run.engine, ENGINES[run.engine].about, ", ".join(f"{k} {v}" for k, v in run.settings.items())]
        for run in results.engines
    ]
    yield Table(["engine", "what it is", "what its processes run with"], about, texts=3)


def _bandwidths(results: CollectivesResults, name: str) -> Table:
    rows = []
    for one in results.series:
        if one.collective == name:
            times = spread(one.times_ms)
            bus = bus_bandwidth(name, one.bytes, times.median, results.ranks)
            rates = [f"{algorithm_bandwidth(one.bytes, times.median):.3f}", NOTHING if bus is None else f"{bus:.3f}"]
            spans = f"{times.low:.4g} .. {times.high:.4g}"
            rows.append([one.engine, shown_size(one.bytes), f"{times.median:.4g}", spans, *rates])
    return Table(["engine", "size", "ms", "quartiles", "algorithm GB/s", "bus GB/s"], rows)


def free_folder(parent: Path, date: str, host_class: str, part: str) -> tuple[Path, bool]:
    """Return the folder for the `part` (suite, collectives or parallel) of a day's results, and whether it has others.

    Earlier results are never overwritten: a second comparison on a day gets a new folder.
    """
    from hvdtrain.bench.results import FILE, read_results

    number = 1
    while True:
        folder = parent / (f"{date}-{host_class}" + f"-{number}" * (number > 1))
        if not os.path.lexists(folder):
            return folder, False
        if (folder / FILE).exists() and getattr(read_results(folder), part) is None:
            return folder, True
        number += 1
