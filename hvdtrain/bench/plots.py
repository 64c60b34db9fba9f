"""The figures of a report, as PNG. No TensorFlow."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.bench.bandwidth import ADD, COLLECTIVES, algorithm_bandwidth, bus_bandwidth
from hvdtrain.bench.noise import Spread, spread
from hvdtrain.bench.results import Cell, CollectivesResults
from hvdtrain.bench.sides import IDEAL
from hvdtrain.bench.statistics import Figures, setting
from hvdtrain.observability.plots import GRID, INK

COLOURS = ("#2f6db5", "#c8502b", "#3d9455", "#8a5fb0", "#c59a1d", "#4fa3b8", "#b0527d", "#777777")
PART_COLOURS = {"forward and backward": "#2f6db5", "exchange": "#c8502b", "update": "#3d9455", "input": "#c59a1d"}

Row = tuple[Cell, Figures]


def _figure(width: float, height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110, facecolor="white")
    return stream.getvalue()


def _style(axes: Any, title: str, *, grid: str = "x") -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.grid(True, axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#bbbbbb")


def _groups(rows: Sequence[Row]) -> dict[Any, list[Row]]:
    groups: dict[Any, list[Row]] = {}
    for cell, known in rows:
        groups.setdefault(setting(cell), []).append((cell, known))
    return groups


def titled(cell: Cell) -> str:
    """Return the title of the cells that are compared with one another."""
    words = [cell.model, f"{cell.ranks} rank" + "s" * (cell.ranks > 1), f"batch {cell.batch}"]
    words += [cell.precision] if cell.precision != "float32" else []
    return ", ".join(words + ([f"accumulate {cell.accumulate}"] if cell.accumulate > 1 else []))


def bars(names: Sequence[str], figures: Mapping[str, Sequence[float]]) -> bytes:
    """Plot one panel of horizontal bars for each of several figures of the same things."""
    figure = _figure(8.5, 0.28 * len(names) + 0.8)
    panels = figure.subplots(1, len(figures), squeeze=False, sharey=True)[0]
    for axes, (title, values) in zip(panels, figures.items(), strict=True):
        axes.barh(range(len(names)), values, color=[COLOURS[number % len(COLOURS)] for number in range(len(names))])
        axes.set_yticks(range(len(names)), names)
        _style(axes, title)
    panels[0].invert_yaxis()
    return _png(figure)


def throughput(rows: Sequence[Row]) -> bytes | None:
    """Plot samples per second of each side, one panel per setting, with quartiles over the rounds.

    A line marks the ideal. None if only the ideal was measured.
    """
    groups = list(_groups([row for row in rows if row[0].side != IDEAL]).values())
    if not groups:
        return None
    heights = [0.28 * len(group) + 0.8 for group in groups]
    figure = _figure(8.5, sum(heights))
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, group in zip(panels, groups, strict=True):
        _draw_rates(axes, list(reversed(group)))
    return _png(figure)


def _draw_rates(axes: Any, group: Sequence[Row]) -> None:
    rates = [known.samples_per_second for _, known in group]
    slowest = [1000.0 * cell.batch / known.step_ms.high for cell, known in group]
    fastest = [1000.0 * cell.batch / known.step_ms.low for cell, known in group]
    spans = [
        [rate - low for rate, low in zip(rates, slowest, strict=True)],
        [high - rate for rate, high in zip(rates, fastest, strict=True)],
    ]
    axes.barh([cell.side for cell, _ in group], rates, xerr=spans, color=COLOURS[0], ecolor=INK, height=0.65)
    cell, known = group[0]
    if known.ideal_per_second is not None:
        axes.axvline(known.ideal_per_second, color=COLOURS[1], linestyle="--", linewidth=1)
    _style(axes, titled(cell))
    axes.set_xlabel("samples a second", fontsize=8, color=INK)


def efficiency(rows: Sequence[Row]) -> bytes | None:
    """Plot strong and weak efficiency over the number of ranks, one panel per model; None if none is known."""
    models = list(dict.fromkeys(cell.model for cell, _ in rows))
    if not any(_known_points(rows, model, kind) for model in models for kind in ("strong", "weak")):
        return None
    # Each side has one colour and one position in all panels.
    labels = list(dict.fromkeys(_label(cell) for cell, _ in rows if cell.ranks > 1))
    figure = _figure(8.5, 2.6 * len(models))
    panels = figure.subplots(len(models), 2, squeeze=False)
    for line, model in zip(panels, models, strict=True):
        for axes, kind in zip(line, ("strong", "weak"), strict=True):
            for label, points in _known_points(rows, model, kind).items():
                number = labels.index(label)
                aside = 0.06 * (number - (len(labels) - 1) / 2)
                sizes, shares = [p[0] + aside for p in points], [p[1].median for p in points]
                spans = [[p[1].median - p[1].low for p in points], [p[1].high - p[1].median for p in points]]
                colour = COLOURS[number % len(COLOURS)]
                axes.errorbar(sizes, shares, yerr=spans, marker="o", markersize=4, color=colour, label=label)
            axes.axhline(1.0, color="#bbbbbb", linewidth=0.8)
            axes.set_ylim(bottom=0)
            axes.set_xticks(ranks := sorted({cell.ranks for cell, _ in rows if cell.ranks > 1}))
            axes.set_xlim(ranks[0] - 0.5, ranks[-1] + 0.5)
            _style(axes, f"{model}, {kind} scaling", grid="y")
            axes.set_xlabel("ranks", fontsize=8, color=INK)
            if axes.get_legend_handles_labels()[1]:
                axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    return _png(figure)


def _known_points(rows: Sequence[Row], model: str, kind: str) -> dict[str, list[tuple[int, Spread]]]:
    found: dict[str, list[tuple[int, Spread]]] = {}
    for cell, known in rows:
        share = getattr(known, kind)
        if cell.model == model and cell.ranks > 1 and isinstance(share, Spread):
            found.setdefault(_label(cell), []).append((cell.ranks, share))
    return {label: sorted(points, key=lambda point: point[0]) for label, points in found.items()}


def _label(cell: Cell) -> str:
    label = cell.side + f" {cell.precision}" * (cell.precision != "float32")
    return label + f" K={cell.accumulate}" * (cell.accumulate > 1)


def breakdown(rows: Sequence[Row]) -> bytes | None:
    """Plot the breakdown of the step time, for the sides that have one; negative parts are not drawn."""
    known = [(cell, figures.breakdown_ms) for cell, figures in rows if figures.breakdown_ms is not None]
    if not known:
        return None
    figure = _figure(8.5, 0.4 * len(known) + 1.2)
    axes = figure.subplots()
    labels = [f"{titled(cell)}\n{cell.side}" for cell, _ in reversed(known)]
    left = [0.0] * len(known)
    for part, colour in PART_COLOURS.items():
        shares = []
        for _, parts in reversed(known):
            drawn = {name: max(0.0, value) for name, value in parts.items()}
            shares.append(100.0 * drawn[part] / sum(drawn.values()))
        axes.barh(labels, shares, left=left, color=colour, label=part, height=0.6)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    _style(axes, "Where a step's time goes")
    axes.set_xlabel("per cent of the step", fontsize=8, color=INK)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return _png(figure)


def bandwidths(results: CollectivesResults) -> bytes | None:
    """Plot time and bus bandwidth over the size, one row of panels per collective; None if none was measured."""
    measured = [name for name in COLLECTIVES if any(one.collective == name for one in results.series)]
    if not measured:
        return None
    engines = list(dict.fromkeys(one.engine for one in results.series if one.collective != ADD))
    figure = _figure(8.5, 2.5 * len(measured))
    panels = figure.subplots(len(measured), 2, squeeze=False)
    for line, name in zip(panels, measured, strict=True):
        for number, engine in enumerate(engines):
            _draw_engine(line, results=results, engine=engine, collective=name, colour=COLOURS[number % len(COLOURS)])
        if name == "allreduce":
            _draw_memory(line, results)
        for axes, label in zip(line, ("ms a call", "bus bandwidth, GB/s"), strict=True):
            _style(axes, f"{name}, {label}", grid="both")
            axes.set_xscale("log")
            axes.set_yscale("log")
            axes.set_xlabel("bytes", fontsize=8, color=INK)
        line[0].legend(frameon=False, fontsize=7, labelcolor=INK)
    return _png(figure)


def _draw_engine(line: Any, results: CollectivesResults, engine: str, collective: str, colour: str) -> None:
    series = [one for one in results.series if (one.engine, one.collective) == (engine, collective)]
    if not series:
        return
    sizes, times = [one.bytes for one in series], [spread(one.times_ms).median for one in series]
    line[0].plot(sizes, times, marker="o", markersize=3, color=colour, label=engine)
    rates = [bus_bandwidth(collective, s, t, results.ranks) for s, t in zip(sizes, times, strict=True)]
    line[1].plot(sizes, rates, marker="o", markersize=3, color=colour, label=engine)


def _draw_memory(line: Any, results: CollectivesResults) -> None:
    series = [one for one in results.series if one.collective == ADD]
    if not series:
        return
    sizes, times = [one.bytes for one in series], [spread(one.times_ms).median for one in series]
    line[0].plot(sizes, times, linestyle="--", color=INK, label="memory: add on every rank")
    rates = [algorithm_bandwidth(s, t) for s, t in zip(sizes, times, strict=True)]
    line[1].plot(sizes, rates, linestyle="--", color=INK)
