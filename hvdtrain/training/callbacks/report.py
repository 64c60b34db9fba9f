"""Reports of a training: logged steps, epochs, and the result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.observability.events import EpochRecord, EvaluationRecord, StepRecord
from hvdtrain.observability.summary import median_p90
from hvdtrain.observability.wording import with_loss
from hvdtrain.runtime.stragglers import SlowRank
from hvdtrain.training.callbacks.base import MEASURED, Callback, StepEnd
from hvdtrain.training.callbacks.parts import Parts
from hvdtrain.training.clock import StepClock
from hvdtrain.training.evaluation.evaluate import Evaluation


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
    evaluations: list[EvaluationRecord] = field(repr=False)
    """One per evaluated epoch."""
    samples_per_second: float
    """Median over the steady steps, over all ranks."""
    step_ms: Mapping[str, float | None]
    """Median and 90th percentile of the steady steps' wall time."""
    wall_seconds: float
    data_wait: float = 0.0
    """Fraction of the steady steps' time that this rank waited for data."""
    history: Mapping[str, list[Any]] = field(default_factory=dict, repr=False)
    """Metrics of each epoch by name, as in Keras' History: numbers, or arrays such as one value per class."""
    epoch: list[int] = field(default_factory=list, repr=False)
    """Epochs of `history`, from 0."""
    skipped: int = 0
    """Skipped steps, whose gradients overflowed (mixed_float16)."""
    slowest_rank: SlowRank | None = None
    """The straggler, if any; the same on every rank."""
    bad_steps: Mapping[str, Any] | None = None
    """Numbers of bad steps, including those before a resume: `non_finite`, `spikes`, and the first and last discarded
    step of each rollback; None without a policy (`on_bad_step`, `spike_threshold`).
    """
    staleness: Mapping[int, int] | None = None
    """With `update="async"`, the updates of all servers by their staleness: others applied since the pull."""
    slices: list[int] | None = None
    """With `update="async"`, the slices of batches that each rank has trained on."""


class TrainingReport(Callback):
    """Logs measured steps, sends epochs and evaluations to observers, and keeps them for the result."""

    when = MEASURED

    def __init__(self, parts: Parts, clock: StepClock) -> None:
        self.measures = parts.plan.logged
        self._parts = parts
        self._clock = clock
        self._evaluations: list[EvaluationRecord] = []
        self._epoch_loss: float | None = float("nan")
        self._history: dict[str, list[Any]] = {}
        self._epochs: list[int] = []

    def after_step(self, step: StepEnd) -> None:
        """Report a measured step, after it was checked. Collective."""
        measured = step.measurement
        metrics = dict(self._parts.step.recent_metrics())
        so_far = dict(self._parts.step.metrics_so_far())
        metrics.pop("loss", None)
        record = StepRecord(
            step=step.number,
            epoch=step.epoch,
            loss=step.loss if "loss" in so_far else None,
            learning_rate=float(measured.learning_rate),
            samples_per_second=self._clock.samples_per_second(),
            grad_norm=float(measured.grad_norm),
            loss_scale=None if measured.loss_scale is None else float(measured.loss_scale),
            metrics=metrics,
            so_far=so_far,
        )
        self._parts.observers.on_step(record)

    def training_metrics(self) -> dict[str, Any]:
        """Return loss and metrics of the epoch, and begin the next. Collective."""
        self._parts.monitor.end_epoch()
        figures = dict(self._parts.step.epoch_metrics())
        self._epoch_loss = figures.get("loss")
        return figures

    def evaluated(self, step: StepEnd, outcome: Evaluation) -> dict[str, Any]:
        """Report an evaluation, and return its metrics prefixed by `val_`."""
        record = EvaluationRecord(
            step=step.number, epoch=step.epoch, loss=outcome.loss, seconds=outcome.seconds, metrics=outcome.metrics
        )
        self._evaluations.append(record)
        self._parts.observers.on_evaluation(record)
        return {f"val_{name}": value for name, value in outcome.as_dict().items()}

    def end_epoch(self, step: StepEnd, figures: Mapping[str, Any]) -> None:
        """Report an epoch's metrics, including its evaluation's."""
        self._epochs.append(step.epoch)
        for name in sorted(figures):  # the order in which Keras hands them to callbacks
            self._history.setdefault(name, []).append(figures[name])
        self._parts.observers.on_epoch(EpochRecord(step.number, step.epoch, figures))

    def result(self, *, wall_seconds: float, slowest: SlowRank | None) -> FitResult:
        """Return the result of the training; its history is Keras', if there were callbacks, which may add to it."""
        scalars, rule, keras = self._parts.state.scalars, self._parts.rule, self._parts.keras
        bad, figures = scalars.bad_steps, rule.figures
        counts = {"non_finite": bad.non_finite, "spikes": bad.spikes, "rollbacks": bad.rollbacks}
        return FitResult(
            steps=scalars.step,
            epochs=scalars.epoch + (scalars.step_in_epoch > 0),
            train_loss=self._epoch_loss,
            evaluations=self._evaluations,
            samples_per_second=self._clock.steady_samples_per_second(),
            step_ms=median_p90(self._clock.steady_ms()),
            wall_seconds=wall_seconds,
            data_wait=self._clock.waiting_share(),
            history=self._history if keras is None else keras.history.history,
            epoch=self._epochs if keras is None else keras.history.epoch,
            skipped=self._parts.monitor.skipped,
            slowest_rank=slowest,
            bad_steps=None if rule.guard is None else counts,
            staleness=figures.get("staleness"),
            slices=figures.get("slices"),
        )


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
        **({} if result.staleness is None else {"staleness": dict(result.staleness), "slices": result.slices}),
    }
    if last is not None:
        figures.update({f"val_{name}": value for name, value in with_loss(last).items()})
    return figures
