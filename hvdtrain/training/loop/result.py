"""Result of a training run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.observability.events import EvaluationRecord
from hvdtrain.observability.wording import with_loss
from hvdtrain.runtime.stragglers import SlowRank


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """Result of a training run; all but the times is the same on every rank."""

    steps: int
    """Completed optimizer steps, including those before a resume."""
    epochs: int
    """Completed passes over the data, the last one possibly cut short."""
    train_loss: float | None
    """Mean loss over the last epoch, NaN if none was trained; for a model's own `train_step`, the `loss` that it
    returned, if any.
    """
    evaluations: list[EvaluationRecord]
    """One per evaluated epoch."""
    samples_per_second: float
    """Median over the steady steps, over all ranks."""
    step_ms: Mapping[str, float | None]
    """Median and 90th percentile of the steady steps' wall time."""
    wall_seconds: float
    data_wait: float = 0.0
    """Fraction of the steady steps' time that this rank waited for data."""
    history: Mapping[str, list[Any]] = field(default_factory=dict)
    """Metrics of each epoch by name, as in Keras' History: numbers, or arrays such as one value per class."""
    epoch: list[int] = field(default_factory=list)
    """Epochs of `history`, from 0."""
    skipped: int = 0
    """Skipped steps, whose gradients overflowed (mixed_float16)."""
    slowest_rank: SlowRank | None = None
    """The straggler, if any; the same on every rank."""
    bad_steps: Mapping[str, Any] | None = None
    """Numbers of bad steps, including those before a resume: `non_finite`, `spikes`, and the first and last discarded
    step of each rollback; None without a policy (`on_bad_step`, `spike_threshold`).
    """


def summary_of(result: FitResult) -> dict[str, Any]:
    """Return the entries of `summary.json`."""
    last = result.evaluations[-1] if result.evaluations else None
    figures: dict[str, Any] = {
        "steps": result.steps,
        "epochs": result.epochs,
        **({} if result.train_loss is None else {"train_loss": result.train_loss}),
        "samples_per_second": result.samples_per_second,
        "step_ms": dict(result.step_ms),
        "data_wait": result.data_wait,
        "wall_seconds": result.wall_seconds,
        **({} if result.slowest_rank is None else {"slowest_rank": result.slowest_rank.as_dict()}),
        **({} if result.bad_steps is None else {"bad_steps": dict(result.bad_steps)}),
    }
    if last is not None:
        figures.update({f"val_{name}": value for name, value in with_loss(last).items()})
    return figures
