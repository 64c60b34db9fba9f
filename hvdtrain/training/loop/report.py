"""Reports of a training: logged steps, epochs, and the result."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, StepRecord
from hvdtrain.observability.summary import median_p90
from hvdtrain.observability.wording import with_loss
from hvdtrain.runtime.stragglers import SlowRank
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.loop.clock import StepClock
from hvdtrain.training.loop.loop import StepEnd
from hvdtrain.training.loop.loss_monitor import LossMonitor
from hvdtrain.training.step.contract import CompiledStep, Measured


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


class TrainingReport:
    """Computes metrics, sends them to observers and keeps those of epochs."""

    def __init__(self, step: CompiledStep, monitor: LossMonitor, clock: StepClock, observers: Observer) -> None:
        self._step = step
        self._monitor = monitor
        self._clock = clock
        self._observers = observers
        self._evaluations: list[EvaluationRecord] = []
        self._epoch_loss: float | None = float("nan")
        self._history: dict[str, list[Any]] = {}
        self._epochs: list[int] = []

    def log_step(self, step: StepEnd, measured: Measured, loss: float) -> None:
        """Report a measured step. Collective."""
        metrics = dict(self._step.recent_metrics())
        so_far = dict(self._step.metrics_so_far())
        metrics.pop("loss", None)
        record = StepRecord(
            step=step.number,
            epoch=step.epoch,
            loss=loss if "loss" in so_far else None,
            learning_rate=float(measured.learning_rate),
            samples_per_second=self._clock.samples_per_second(),
            grad_norm=float(measured.grad_norm),
            loss_scale=None if measured.loss_scale is None else float(measured.loss_scale),
            metrics=metrics,
            so_far=so_far,
        )
        self._observers.on_step(record)

    def training_metrics(self) -> dict[str, Any]:
        """Return loss and metrics of the epoch, and begin the next. Collective."""
        self._monitor.end_epoch()
        figures = dict(self._step.epoch_metrics())
        self._epoch_loss = figures.get("loss")
        return figures

    def evaluated(self, step: StepEnd, outcome: Evaluation) -> dict[str, Any]:
        """Report an evaluation, and return its metrics prefixed by `val_`."""
        record = EvaluationRecord(
            step=step.number, epoch=step.epoch, loss=outcome.loss, seconds=outcome.seconds, metrics=outcome.metrics
        )
        self._evaluations.append(record)
        self._observers.on_evaluation(record)
        return {f"val_{name}": value for name, value in outcome.as_dict().items()}

    def end_epoch(self, step: StepEnd, figures: Mapping[str, Any]) -> None:
        """Report an epoch's metrics, including its evaluation's."""
        self._epochs.append(step.epoch)
        for name in sorted(figures):  # the order in which Keras hands them to callbacks
            self._history.setdefault(name, []).append(figures[name])
        self._observers.on_epoch(EpochRecord(step.number, step.epoch, figures))

    def result(
        self,
        scalars: Scalars,
        *,
        wall_seconds: float,
        history: Any = None,
        guarded: bool = False,
        slowest: SlowRank | None = None,
        of_rule: Mapping[str, Any] | None = None,
    ) -> FitResult:
        """Return the result of the training.

        `history` is Keras' History, if there were callbacks, which may have added metrics.
        """
        bad = scalars.bad_steps
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
            history=self._history if history is None else history.history,
            epoch=self._epochs if history is None else history.epoch,
            skipped=self._monitor.skipped,
            slowest_rank=slowest,
            bad_steps=counts if guarded else None,
            staleness=(of_rule or {}).get("staleness"),
            slices=(of_rule or {}).get("slices"),
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
