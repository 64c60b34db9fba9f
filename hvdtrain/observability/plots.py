"""curves.png: loss and accuracy over steps."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.observability.jsonl import read_metrics

Records = list[dict[str, Any]]
Floats = npt.NDArray[np.float64]

TRAINING, VALIDATION = "#7a9cc6", "#c8502b"
INK, GRID = "#333333", "#e6e6e6"

_FIELDS = {"kind", "step", "epoch", "loss", "learning_rate", "samples_per_second", "grad_norm", "seconds"}


def draw_curves(
    metrics_path: str | Path, png_path: str | Path, *, title: str = "", staleness: Mapping[int, int] | None = None
) -> None:
    """Draw loss and accuracy of training and validation over steps, from a metrics.jsonl.

    A further panel has the updates of an asynchronous run by their `staleness`, if given.

    Without an accuracy, the first other metric takes its place; without any metric there is one panel. Values that are
    not finite leave a gap.

    Raises:
        DataError: `metrics_path` is not a metrics file.
        OSError: it cannot be read, or `png_path` cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    records = read_metrics(metrics_path)
    names = ["loss", *second_panel(records)]
    count = len(names) + bool(staleness)
    figure = Figure(figsize=(5.2 * count, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, count, squeeze=False)[0]
    for axes, name in zip(panels, names, strict=False):
        _draw_panel(axes, records, name)
    if staleness:
        panels[-1].bar(list(staleness), list(staleness.values()), color=TRAINING)
        _style(panels[-1], "updates by staleness", xlabel="updates of others since the parameters were pulled")
    if title:
        figure.suptitle(title, color=INK, fontsize=12, x=0.01, ha="left", weight="bold")
    figure.savefig(png_path, dpi=160, facecolor="white")


def second_panel(records: Records) -> list[str]:
    """Return the metric of the second panel: ``["accuracy"]``, another one in `records`, or none."""
    metrics = [name for record in records if record["kind"] != "epoch" for name in record if name not in _FIELDS]
    return ["accuracy"] if "accuracy" in metrics else metrics[:1]


def curve(records: Records, kind: str, name: str) -> tuple[Floats, Floats]:
    """Return steps and values of `name` in the records of one kind; NaN for values that are not finite.

    Of a metric with several values, such as one for each class, it is their mean.
    """
    known = [record for record in records if record["kind"] == kind and name in record]
    points = [(record["step"], np.mean(np.array(record[name], dtype=np.float64))) for record in known]
    steps, values = np.array(points, dtype=np.float64).reshape(-1, 2).T
    return steps, values


def without_stubs(steps: Floats, values: Floats) -> tuple[Floats, Floats]:
    """Leave out values of fewer than half of the usual steps, as at an epoch's end: they scatter more, like events."""
    since = np.diff(steps)
    whole = np.concatenate([np.ones(min(len(steps), 1), bool), since * 2 >= np.median(since) if len(since) else []])
    return steps[whole.astype(bool)], values[whole.astype(bool)]


def smoothed(values: Floats) -> Floats:
    """Return a moving average over about a thirtieth of `values`, ignoring gaps."""
    window = np.ones(len(values) // 60 * 2 + 1)
    finite = np.isfinite(values)
    sums = np.convolve(np.where(finite, values, 0.0), window, mode="same")
    counts = np.convolve(finite.astype(float), window, mode="same")
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)


def _draw_panel(axes: Any, records: Records, name: str) -> None:
    steps, values = without_stubs(*curve(records, "step", name))
    evaluated, validation = curve(records, "evaluation", name)
    if np.isfinite(values).any():
        marker = "o" if len(values) == 1 else ""
        if len(values) > 60:
            axes.plot(steps, values, color=TRAINING, alpha=0.3, linewidth=0.8)
        shown = smoothed(values) if len(values) > 60 else values
        axes.plot(steps, shown, color=TRAINING, linewidth=1.6, marker=marker, label="training")
    if np.isfinite(validation).any():
        marker = "o" if len(validation) <= 40 else ""
        style = {"color": VALIDATION, "linewidth": 1.8, "marker": marker, "markersize": 4}
        axes.plot(evaluated, validation, label="validation", **style)
        if np.isfinite(validation[-1]):
            place: dict[str, Any] = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
            last = (evaluated[-1], validation[-1])
            axes.annotate(f"{validation[-1]:.4g}", last, fontsize=9, color=VALIDATION, **place)
    both = np.concatenate([values, validation])
    both = both[np.isfinite(both)]
    if name == "loss" and len(both) and both.min() > 0 and both.max() / both.min() > 20:
        axes.set_yscale("log")
    elif "accuracy" in name and len(both) and both.max() <= 1:
        axes.set_ylim(top=1.02)
    _style(axes, name.replace("_", " "), xlabel="step")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9, labelcolor=INK)
    if epoch := steps_per_epoch(record for record in records if record["kind"] == "evaluation"):
        top = axes.secondary_xaxis("top", functions=(lambda step: step / epoch, lambda number: number * epoch))
        top.set_xlabel("epoch", color=INK, fontsize=9, loc="right")
        top.tick_params(colors=INK, labelsize=9, length=0)
        top.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        top.spines["top"].set_visible(False)


def _style(axes: Any, title: str, *, xlabel: str) -> None:
    axes.set_title(title, loc="left", color=INK, fontsize=12, y=1.0, pad=20)
    axes.set_xlabel(xlabel, color=INK, fontsize=9)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=9, length=0)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color("#bbbbbb")


def steps_per_epoch(evaluations: Iterable[dict[str, Any]]) -> float | None:
    """Return the steps per epoch if evaluations came at ends of epochs, except a last one cut short."""
    lengths = [record["step"] / (record["epoch"] + 1) for record in evaluations]
    whole = lengths[:-1] if len(lengths) > 1 else lengths
    return whole[0] if whole and len(set(whole)) == 1 else None
