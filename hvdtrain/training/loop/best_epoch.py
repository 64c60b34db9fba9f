"""The best epoch of a training so far, as its state records it."""

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.config.checkpoint import BestMetric
from hvdtrain.config.errors import ConfigError
from hvdtrain.state.scalars import Scalars


def begin_best(metric: BestMetric | None, scalars: Scalars, metrics: Iterable[str], *, validated: bool) -> None:
    """Check that epochs have the `metric`, and forget a best epoch by another one.

    Args:
        metric: by which the best epoch is chosen; None: there is none.
        scalars: where it is recorded.
        metrics: names of what an epoch reports, the loss among them if there is one.
        validated: whether there are validation data.

    Raises:
        ConfigError: no epoch will have the metric; those that it has are named.
    """
    known = [f"{prefix}{name}" for prefix in ("", "val_")[: 1 + validated] for name in metrics]
    if metric is not None and metric.name not in known:
        more = "" if validated else " Those that begin with val_ need validation data."
        raise ConfigError(
            f"The best epoch is chosen by a metric of this training. Received: {metric.name!r}. It has "
            f"{', '.join(known)}.{more}"
        )
    kind = metric and (metric.name, metric.mode)
    if scalars.best is not None and kind != (scalars.best["metric"], scalars.best["mode"]):
        scalars.best = None


def note_best(metric: BestMetric | None, scalars: Scalars, step: int, logs: Mapping[str, Any]) -> None:
    """Record the epoch that ended with `step`, with these figures, as the best, if it is.

    Raises:
        ConfigError: a metric with several values.
    """
    value = None if metric is None else logs.get(metric.name)
    if metric is None or value is None:
        return
    if hasattr(value, "shape"):
        raise ConfigError(
            f"The best epoch is chosen by a single number. Received: {metric.name!r} of {len(value)} values. Use "
            "another metric, or one that averages them, such as F1Score(average='macro')."
        )
    if metric.improves(value, scalars.best["value"] if scalars.best else None):
        scalars.best = {"metric": metric.name, "mode": metric.mode, "value": float(value), "step": step}
