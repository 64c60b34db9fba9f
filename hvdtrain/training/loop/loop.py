"""The loop over optimizer steps: what happens when, and nothing about how."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.events import EvaluationRecord, Observer, StepRecord
from hvdtrain.observability.summary import median_p90
from hvdtrain.optim.precision import has_dynamic_scale
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.loop.clock import StepClock
from hvdtrain.training.loop.data_wait import WaitingWatch
from hvdtrain.training.loop.hooks import Hooks
from hvdtrain.training.loop.loss_monitor import LossMonitor
from hvdtrain.training.loop.result import FitResult
from hvdtrain.training.step.result import CompiledStep, Measured


@dataclass(frozen=True)
class Plan:
    """When the loop ends, logs and saves, in optimizer steps."""

    total_steps: int
    log_every: int = 10
    checkpoint_every: int | None = None
    """None: at the end of every epoch."""


class TrainingLoop:
    """Runs steps until the plan is fulfilled.

    Args:
        backend: the replicas.
        state: what is trained.
        step: the compiled step.
        data: the batches.
        observers: who is told what happens.
        evaluate: evaluates at the end of an epoch; None where there is no validation data.
        save: saves the state; None where nothing is saved.
        hooks: may look in and end training.
        consolidate: makes the state what is evaluated and saved.
        adopt_weights: takes over weights that a callback may have set.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        step: CompiledStep,
        data: TrainingData,
        observers: Observer,
        *,
        evaluate: Callable[[], Evaluation] | None,
        save: Callable[[], None] | None,
        hooks: Hooks | None = None,
        consolidate: Callable[[], None],
        adopt_weights: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._state = state
        self._step = step
        self._data = data
        self._observers = observers
        self._evaluate = evaluate
        self._save = save
        self._hooks = hooks or Hooks()
        self._watched = hooks is not None
        self._consolidate = consolidate
        self._adopt_weights = adopt_weights
        self.clock = StepClock(data.batch, overlapping=backend.capabilities.asynchronous)
        self.loss_monitor = LossMonitor(
            data.steps_per_epoch,
            state.scalars.epoch * data.steps_per_epoch + state.scalars.place(data.steps_per_epoch),
            skips=has_dynamic_scale(state.optimizer),
            epoch_sums=(state.scalars.progress.loss_sum, state.scalars.progress.loss_weight),
        )
        self.evaluations: list[EvaluationRecord] = []
        self._waiting = WaitingWatch(backend, self.clock, data.remedy)

    def run(self, plan: Plan) -> None:
        """Train from the state's step to the plan's last one.

        Raises:
            NonFiniteError: the loss was NaN or infinite; the message names the step.
        """
        scalars = self._state.scalars
        first = scalars.step
        place = scalars.epoch * self._data.steps_per_epoch + scalars.place(self._data.steps_per_epoch)
        batches = iter(self._backend.distribute(self._data.batches(place)))
        self.clock.resume()
        while scalars.step < plan.total_steps:
            done = scalars.step + 1
            epoch, within = scalars.epoch, scalars.place(self._data.steps_per_epoch)
            epoch_ends = within + 1 == self._data.steps_per_epoch or done == plan.total_steps
            saves = self._save_is_due(plan, done, epoch_ends)
            # A logged step is looked at before it is saved: no checkpoint holds what is not finite.
            logged = epoch_ends or saves or done % plan.log_every == 0 or done == first + 1
            if within == 0 or done == first + 1:
                self._hooks.begin_epoch(epoch)
            self._hooks.begin_step(within)
            batch = self.clock.next_of(batches)
            result = self._step(batch, measure=logged)
            self.loss_monitor.note(result.totals)
            self.clock.tick(waited=logged)
            scalars.advance(self._data.steps_per_epoch)
            self._observers.on_progress(done)
            if self._hooks.end_step(within, result.totals, self._step.metrics_so_far):
                self._adopt_weights()
            if logged:
                self._log(epoch, result.measured)
            if epoch_ends:
                self._end_epoch(epoch)
            stops = logged and self._hooks.stops()
            if saves or stops:
                self._save_state()
            if stops:
                return
            if logged:
                self.clock.resume()

    def result(self, *, wall_seconds: float, history: Mapping[str, list[float]]) -> FitResult:
        """Return what the run came to.

        Args:
            wall_seconds: how long it took, with what came before the first step.
            history: figures of each epoch, where there were Keras callbacks.
        """
        scalars = self._state.scalars
        return FitResult(
            steps=scalars.step,
            epochs=scalars.epoch + (scalars.place(self._data.steps_per_epoch) > 0),
            train_loss=self.loss_monitor.epoch_loss,
            evaluations=self.evaluations,
            samples_per_second=self.clock.steady_samples_per_second(),
            step_ms=median_p90(self.clock.steady_ms()),
            wall_seconds=wall_seconds,
            data_wait=self.clock.waiting_share(),
            history=history,
        )

    def _save_state(self) -> None:
        """Save the state, with statistics that are the same on every replica."""
        if self._save is not None:
            self._consolidate()
            self._save()

    def _save_is_due(self, plan: Plan, done: int, epoch_ends: bool) -> bool:
        if self._save is None:
            return False
        due = epoch_ends if plan.checkpoint_every is None else done % plan.checkpoint_every == 0
        return due or done == plan.total_steps

    def _log(self, epoch: int, measured: Measured | None) -> None:
        assert measured is not None, "logged steps are measured"
        scale = None if measured.loss_scale is None else float(measured.loss_scale)
        loss = self.loss_monitor.settle(finite_parameters=bool(measured.finite), loss_scale=scale)
        self._note_progress()
        throughput = self.clock.samples_per_second()
        step = self._state.scalars.step
        rate, norm = float(measured.learning_rate), float(measured.grad_norm)
        metrics = {name: float(value) for name, value in measured.metrics.items()}
        self._observers.on_step(StepRecord(step, epoch, loss, rate, throughput, norm, scale, metrics))
        warning = self._waiting.look()
        if warning is not None:
            self._observers.on_message(warning)

    def _note_progress(self) -> None:
        """Let the state hold what an epoch that is not finished has come to so far."""
        scalars, progress = self._state.scalars, self._state.scalars.progress
        sums = self.loss_monitor.epoch_sums if scalars.step_in_epoch else (0.0, 0.0)
        progress.loss_sum, progress.loss_weight = sums

    def _end_epoch(self, epoch: int) -> None:
        self.loss_monitor.end_epoch()
        if self._evaluate is not None or self._watched:
            self._consolidate()
        logs = {"loss": self.loss_monitor.epoch_loss, **self._step.epoch_metrics()}
        if self._evaluate is not None:
            self._hooks.begin_evaluation()
            outcome = self._evaluate()
            self._hooks.end_evaluation({"loss": outcome.loss, **outcome.metrics})
            step = self._state.scalars.step
            record = EvaluationRecord(step, epoch, outcome.loss, outcome.seconds, outcome.metrics)
            self.evaluations.append(record)
            self._observers.on_evaluation(record)
            logs |= {"val_loss": outcome.loss, **{f"val_{k}": v for k, v in outcome.metrics.items()}}
        self._hooks.end_epoch(epoch, logs)
        if self._watched:
            self._adopt_weights()
