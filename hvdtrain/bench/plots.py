"""The figures of a report, as PNG. No TensorFlow."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.bench.results import Spread
from hvdtrain.observability.plots import GRID, INK

COLOURS = ("#2f6db5", "#c8502b", "#3d9455", "#8a5fb0", "#c59a1d", "#4fa3b8", "#b0527d", "#777777")


@dataclass(frozen=True)
class Bars:
    """A panel of horizontal bars."""

    title: str
    values: Mapping[str, Spread]
    """By name."""
    mark: float | None = None
    """Drawn as a line."""
    xlabel: str = ""


@dataclass(frozen=True)
class Curves:
    """A panel of curves."""

    title: str
    xlabel: str
    curves: Mapping[str, Sequence[tuple[float, Spread]]]
    """Points (x, y) by label."""
    scale: Literal["share", "linear", "logarithmic"] = "share"
    """`share`: from 0, with a line at 1."""
    reference: str | None = None
    """The curve that is drawn dashed."""


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


def _around(values: Sequence[Spread]) -> list[list[float]]:
    """Return the distances from the medians to the quartiles, as matplotlib's error bars take them."""
    return [[value.median - value.low for value in values], [value.high - value.median for value in values]]


def bars(panels: Sequence[Bars]) -> bytes:
    """Plot panels of bars, one below the other."""
    heights = [0.28 * len(panel.values) + 0.8 for panel in panels]
    figure = _figure(sum(heights))
    below = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(below, panels, strict=True):
        names, values = list(panel.values), list(panel.values.values())
        spans = {"xerr": _around(values), "ecolor": INK}
        axes.barh(names, [value.median for value in values], color=COLOURS[0], height=0.65, **spans)
        axes.invert_yaxis()
        if panel.mark is not None:
            axes.axvline(panel.mark, color=COLOURS[1], linestyle="--", linewidth=1)
        _style(axes, panel.title, xlabel=panel.xlabel)
    return _png(figure)


def curves(rows: Sequence[Sequence[Curves]], *, one_legend: bool = False) -> bytes:
    """Plot rows of panels of curves; a label has one colour in all of them, and `one_legend` all labels below them."""
    labels = list(dict.fromkeys(label for row in rows for panel in row for label in panel.curves))
    figure = _figure(2.6 * len(rows))
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for axes, panel in zip(grid.flat, (panel for row in rows for panel in row), strict=True):
        for label, points in panel.curves.items():
            values = [value for _, value in sorted(points, key=lambda point: point[0])]
            colour = COLOURS[labels.index(label) % len(COLOURS)]
            look: dict[str, Any] = {"marker": "o", "markersize": 4, "color": colour}
            if labels.index(label) >= len(COLOURS):
                look["linestyle"] = ":"
            if label == panel.reference:
                look = {"linestyle": "--", "color": INK}
            medians, places = [value.median for value in values], sorted(place for place, _ in points)
            axes.errorbar(places, medians, yerr=_around(values), label=label, **look)
        _style(axes, panel.title, grid="y" if panel.scale == "share" else "both", xlabel=panel.xlabel)
        if panel.scale == "logarithmic":
            axes.set_xscale("log")
            axes.set_yscale("log")
        elif panel.scale == "share":
            axes.axhline(1.0, color="#bbbbbb", linewidth=0.8)
            axes.set_ylim(bottom=0)
            axes.set_xticks(sorted({place for points in panel.curves.values() for place, _ in points}))
        if panel.curves and not one_legend:
            axes.legend(frameon=False, fontsize=7, labelcolor=INK)
    if one_legend:
        figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
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
