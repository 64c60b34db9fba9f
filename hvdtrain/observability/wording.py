"""Formatting of a run's figures, shared by the plain console and the live display."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.observability.events import EpochRecord, EvaluationRecord, RunInfo, StepRecord

Figures = list[tuple[str, str]]
"""(name, formatted value) pairs, the most important first."""


def number(value: float | None) -> str:
    """Format a count as it is, and others with four decimals, or in scientific notation if that loses their digits."""
    if value is None:
        return "-"
    if isinstance(value, int):
        return f"{value:,}"
    plain = value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value)
    return f"{value:.4f}" if plain else f"{value:.2e}"


def rate(samples_per_second: float) -> str:
    """Format a rate, as an integer from 100 on."""
    digits = 0 if samples_per_second >= 100 else 1
    return f"{samples_per_second:.{digits}f} samples/s"


def milliseconds(value: float) -> str:
    """Format a time in ms with three digits, and all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float | None) -> str:
    """Format a time as ``M:SS``, ``H:MM:SS`` or ``Dd H:MM:SS``; ``-`` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f"{minute}:{second:02}"
    return (f"{days}d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 rank``, ``2 ranks``."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def figures_of(values: Mapping[str, Any]) -> Figures:
    """Return figures by name, without those that are None; of several values, such as one per class, the mean."""
    plain = {name: value.mean() if hasattr(value, "mean") else value for name, value in values.items()}
    return [(name, number(value)) for name, value in plain.items() if value is not None]


def step_figures(record: StepRecord) -> Figures:
    """Return loss and metrics of the epoch so far, like Keras' progress bar."""
    return figures_of(record.so_far or {"loss": record.loss, **record.metrics})


def evaluation_figures(record: EvaluationRecord) -> Figures:
    """Return validation loss and metrics, with the prefix ``val_``."""
    return figures_of({f"val_{name}": value for name, value in with_loss(record).items()})


def with_loss(record: StepRecord | EvaluationRecord) -> dict[str, Any]:
    """Return the metrics of a record, after its loss if it has one."""
    return ({} if record.loss is None else {"loss": record.loss}) | dict(record.metrics)


def formatted(figures: Figures) -> list[str]:
    """Return each of `figures` as ``name value``."""
    return [f"{name} {value}" for name, value in figures]


def joined(*parts: str) -> str:
    """Join `parts` into a line, two spaces apart."""
    return "  ".join(parts)


def count_of(done: int, total: int) -> str:
    """Format ``120/230``, padded to the width of ``230/230``."""
    return f"{done:>{len(str(total))}}/{total}"


def epoch_line(record: EpochRecord, info: RunInfo) -> str:
    """Return the line for an epoch: its training figures, then those of its evaluation."""
    epoch = count_of(record.epoch + 1, info.epochs)
    return joined(f"epoch {epoch}", *formatted(figures_of(record.figures)))


def header(info: RunInfo) -> list[tuple[str, str]]:
    """Return the header of a run, as labels and values."""
    lines = [
        ("recipe" if info.run_dir else "model", f"{info.recipe}, {plural(info.parameters, 'parameter')}"),
        ("backend", _backend(info)),
        ("batch", _batch(info)),
        ("steps", _steps(info)),
    ]
    if info.options:
        options = (name if value is True else f"{name} {value}" for name, value in info.options.items())
        lines.append(("options", ", ".join(options)))
    return lines + ([("run folder", str(info.run_dir))] if info.run_dir else [])


def _backend(info: RunInfo) -> str:
    controller = f" ({info.controller})" if info.controller else ""
    ranks = plural(info.world_size, "rank" if info.axes else info.replica_word)
    ranks += f" on a mesh of {' x '.join(f'{axis} {size}' for axis, size in info.axes.items())}" if info.axes else ""
    ranks += f" by {info.launcher}" if info.launcher != "none" else ""
    ranks += f" ({', '.join(plural(count, role) for role, count in info.roles.items())})" if info.roles else ""
    each = " each" if info.world_size > 1 and (info.axes or info.replica_word == "rank") else ""
    threads = f", {plural(info.threads, 'thread')}{each}" if info.threads else ""
    return f"{info.backend}{controller}, {ranks}{threads}"


def _batch(info: RunInfo) -> str:
    parts = [plural(info.global_batch, "sample")]
    if info.roles:
        parts.append("each by one worker")
    elif info.replicas > 1:
        share, even = info.per_replica_batch, info.global_batch % info.replicas == 0
        parts.append(f"{share:,}{'' if even else f' or {share + 1:,}'} per {info.replica_word}")
    if info.accumulate > 1:
        parts.append(f"in {info.accumulate} microbatches of {info.microbatch:,}")
    if info.learning_rate:
        parts.append(f"learning rate {info.learning_rate}")
    return ", ".join(parts)


def _steps(info: RunInfo) -> str:
    epochs = f"{plural(info.epochs - info.begin_epoch, 'epoch')} of {info.steps_per_epoch:,}"
    epochs += f" from epoch {info.begin_epoch + 1} on" if info.begin_epoch else ""
    resumed = f", resumed after {info.start_step:,}" if info.start_step else ""
    return f"{info.total_steps:,}, {epochs}{resumed}"


def ending(summary: Mapping[str, Any], info: RunInfo) -> list[tuple[str, str]]:
    """Return the results of a run, as labels and values, as far as `summary` has them."""
    lines = [
        ("validation", _named(summary, ("val_accuracy", "val_loss"))),
        ("training", _named(summary, ("train_loss",))),
        ("bad steps", _bad_steps(summary.get("bad_steps") or {})),
        ("time", _time(summary)),
        ("slowest", slow_rank(summary.get("slowest_rank"))),
        ("run folder", str(info.run_dir) if info.run_dir else ""),
    ]
    return [(label, value) for label, value in lines if value]


def _bad_steps(counts: Mapping[str, Any]) -> str:
    kinds = {"NaN or infinite": counts.get("non_finite", 0), "spikes": counts.get("spikes", 0)}
    parts = [f"{count:,} {kind}" for kind, count in kinds.items() if count]
    rollbacks = len(counts.get("rollbacks", ()))
    return ", ".join([*parts, *([plural(rollbacks, "rollback")] if rollbacks else [])])


def slow_rank(slow: Mapping[str, Any] | None) -> str:
    """Return what is said of the rank for which the others waited; "" where there was none."""
    if not slow:
        return ""
    return (
        f"rank {slow['rank']} ({slow['host']}), {milliseconds(slow['own_ms'])} ms of its own per step, others "
        f"{milliseconds(slow['others_ms'])} ms: they waited for it {slow['share']:.0%} of the time"
    )


def _named(summary: Mapping[str, Any], names: Iterable[str]) -> str:
    values = {name: summary.get(name) for name in names}
    known = [(name, value) for name, value in values.items() if value is not None and not math.isnan(value)]
    return ", ".join(f"{name.partition('_')[2]} {number(value)}" for name, value in known)


def _time(summary: Mapping[str, Any]) -> str:
    wall, speed = summary.get("wall_seconds"), summary.get("samples_per_second")
    median = (summary.get("step_ms") or {}).get("median")
    parts = [duration(wall)] if wall is not None else []
    if median is not None and speed is not None:
        parts.append(f"median step {milliseconds(median)} ms ({rate(speed)})")
    return ", ".join(parts)
