"""The figures of a report, as PNG. No TensorFlow."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.bench.results import Spread
from hvdtrain.observability.plots import GRID, INK

COLOURS = ("#2f6db5", "#c8502b", "#3d9455", "#8a5fb0", "#c59a1d", "#4fa3b8", "#b0527d", "#777777")


def _figure(height: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _png(figure: Any) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110, facecolor="white")
    return stream.getvalue()


def _style(axes: Any, title: str, *, grid: str = "x", xlabel: str = "") -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=10)
    axes.set_xlabel(xlabel, fontsize=8, color=INK)
    axes.grid(True, axis=grid, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=8, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#bbbbbb")


def bars(names: Sequence[str], figures: Mapping[str, Sequence[float]]) -> bytes:
    """Plot one panel of horizontal bars for each of several figures of the same things."""
    figure = _figure(0.28 * len(names) + 0.8)
    panels = figure.subplots(1, len(figures), squeeze=False, sharey=True)[0]
    for axes, (title, values) in zip(panels, figures.items(), strict=True):
        axes.barh(range(len(names)), values, color=[COLOURS[number % len(COLOURS)] for number in range(len(names))])
        axes.set_yticks(range(len(names)), names)
        _style(axes, title)
    panels[0].invert_yaxis()
    return _png(figure)


@dataclass(frozen=True)
class Panel:
    """Bars of one setting."""

    title: str
    rates: Mapping[str, Spread]
    """Samples per second by side."""
    ideal: float | None
    """Marked by a line."""


def throughput(panels: Sequence[Panel]) -> bytes:
    """Plot samples per second with quartiles over the rounds."""
    heights = [0.28 * len(panel.rates) + 0.8 for panel in panels]
    figure = _figure(sum(heights))
    for axes, panel in zip(
        figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0], panels, strict=True
    ):
        names, rates = list(panel.rates)[::-1], list(panel.rates.values())[::-1]
        spans = [[rate.median - rate.low for rate in rates], [rate.high - rate.median for rate in rates]]
        medians = [rate.median for rate in rates]
        axes.barh(names, medians, xerr=spans, color=COLOURS[0], ecolor=INK, height=0.65)
        if panel.ideal is not None:
            axes.axvline(panel.ideal, color=COLOURS[1], linestyle="--", linewidth=1)
        _style(axes, panel.title, xlabel="samples a second")
    return _png(figure)


Curves = Mapping[str, Sequence[tuple[int, Spread]]]
"""(ranks, efficiency) by side."""


def efficiency(models: Mapping[str, tuple[Curves, Curves]]) -> bytes:
    """Plot strong and weak efficiency over the number of ranks, a row of panels per model."""
    # Each side has one colour and one position in all panels.
    labels = list(dict.fromkeys(label for both in models.values() for curves in both for label in curves))
    every = (point for both in models.values() for curves in both for points in curves.values() for point in points)
    ranks = sorted({number for number, _ in every})
    figure = _figure(2.6 * len(models))
    for line, (model, both) in zip(figure.subplots(len(models), 2, squeeze=False), models.items(), strict=True):
        for axes, kind, curves in zip(line, ("strong", "weak"), both, strict=True):
            for label, points in curves.items():
                number = labels.index(label)
                aside = 0.06 * (number - (len(labels) - 1) / 2)
                shares = [share for _, share in sorted(points, key=lambda point: point[0])]
                axes.errorbar(
                    [size + aside for size in sorted(size for size, _ in points)],
                    [share.median for share in shares],
                    yerr=[[s.median - s.low for s in shares], [s.high - s.median for s in shares]],
                    **{"marker": "o", "markersize": 4, "color": COLOURS[number % len(COLOURS)], "label": label},
                )
            axes.axhline(1.0, color="#bbbbbb", linewidth=0.8)
            axes.set_ylim(bottom=0)
            axes.set_xticks(ranks)
            axes.set_xlim(ranks[0] - 0.5, ranks[-1] + 0.5)
            _style(axes, f"{model}, {kind} scaling", grid="y", xlabel="ranks")
            if curves:
                axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    return _png(figure)


def shares(title: str, parts: Mapping[str, Mapping[str, float]]) -> bytes:
    """Plot the parts of several things in per cent; negative parts are not drawn."""
    names = list(parts)[::-1]
    figure = _figure(0.4 * len(names) + 1.2)
    axes, left = figure.subplots(), [0.0] * len(names)
    for number, part in enumerate(parts[names[0]]):
        drawn = [{key: max(0.0, value) for key, value in parts[name].items()} for name in names]
        widths = [100.0 * each[part] / sum(each.values()) for each in drawn]
        axes.barh(names, widths, left=left, color=COLOURS[number], label=part, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    _style(axes, title, xlabel="per cent of the step")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return _png(figure)


@dataclass(frozen=True)
class Line:
    """Times and rates of an engine over sizes; a reference is drawn dashed."""

    label: str
    sizes: Sequence[int]
    ms: Sequence[float]
    rates: Sequence[float]
    colour: str | None = None
    """None: a reference."""


def bandwidths(collectives: Mapping[str, Sequence[Line]]) -> bytes:
    """Plot time and bus bandwidth over the size, a row of panels per collective."""
    figure = _figure(2.5 * len(collectives))
    for panels, (name, lines) in zip(
        figure.subplots(len(collectives), 2, squeeze=False), collectives.items(), strict=True
    ):
        for line in lines:
            look: dict[str, Any] = {"marker": "o", "markersize": 3, "color": line.colour}
            if line.colour is None:
                look = {"linestyle": "--", "color": INK}
            panels[0].plot(line.sizes, line.ms, label=line.label, **look)
            panels[1].plot(line.sizes, line.rates, **look)
        for axes, label in zip(panels, ("ms a call", "bus bandwidth, GB/s"), strict=True):
            _style(axes, f"{name}, {label}", grid="both", xlabel="bytes")
            axes.set_xscale("log")
            axes.set_yscale("log")
        panels[0].legend(frameon=False, fontsize=7, labelcolor=INK)
    return _png(figure)
