"""What happens around the steps of a training, as hooks of one list, and what the training came to."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.given import in_step
from hvdtrain.observability.events import Observer
from hvdtrain.optim.precision import has_dynamic_scale
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.evaluation.evaluate import Evaluation
from hvdtrain.training.evaluation.hooks import EvaluationHooks
from hvdtrain.training.loop.best_epoch import begin_best, note_best
from hvdtrain.training.loop.data_wait import WaitingWatch
from hvdtrain.training.loop.desync_check import DesyncCheck
from hvdtrain.training.loop.hooks import EPOCH_ENDS, EVERY_STEP, MEASURED, Outcome, StepEnd
from hvdtrain.training.loop.keras_callbacks import callbacks_of_all, refuse_saves_within_epochs
from hvdtrain.training.loop.loop import Plan, TrainingLoop
from hvdtrain.training.loop.loss_monitor import LossMonitor
from hvdtrain.training.loop.report import TrainingReport
from hvdtrain.training.loop.result import FitResult
from hvdtrain.training.step.step_factory import StepFactory
from hvdtrain.training.update_rules.base import UpdateRule


@dataclass(frozen=True)
class Actions:
    """What the trainer does for its loop; every rank calls each of them at the same steps."""

    evaluate: Callable[[Iterable[Batch], EvaluationHooks | None], Evaluation]
    """Evaluates the model."""
    consolidate: Callable[[], None]
    """Makes the model and the optimizer hold what is evaluated and saved."""
    averaged_weights: Callable[[], AbstractContextManager[None]]
    """Gives the model the optimizer's averages of its weights inside a context."""
    save: Callable[[], object] | None
    """Saves the state; None where nothing is saved."""


class StandardTraining:
    """A loop with the hooks of every training: log, check, evaluate, call Keras callbacks, save.

    Args:
        backend: the replicas.
        state: what is trained.
        factory: makes the compiled step.
        rule: takes over weights that callbacks set.
        data: the batches.
        plan: when to stop, log and save.
        actions: evaluates and saves.
        observers: receive the records.
        validation: evaluated at the end of every epoch; None: nothing is.
        callbacks: this rank's Keras callbacks.
        verbose: what they are told that the user asked for.

    Raises:
        ConfigError: a callback that cannot work here.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        factory: StepFactory,
        rule: UpdateRule,
        data: TrainingData,
        plan: Plan,
        actions: Actions,
        observers: Observer,
        *,
        validation: Iterable[Batch] | None = None,
        callbacks: Sequence[Any] = (),
        verbose: str | int = 0,
    ) -> None:
        if not rule.weights_agree:
            refuse_saves_within_epochs(callbacks)
        self._state = state
        self._rule = rule
        scalars = state.scalars
        steps_left = plan.total_steps - scalars.step + scalars.place(data.steps_per_epoch)
        self._callbacks = callbacks_of_all(
            callbacks,
            state.model,
            backend,
            epochs=scalars.epoch + plan.epoch_offset + -(-steps_left // data.steps_per_epoch),
            steps=data.steps_per_epoch,
            prepare=factory.compile_for_callbacks,
            averaged_weights=actions.averaged_weights,
            verbose=verbose,
        )
        self._plan = plan
        begin_best(plan.best, scalars, factory.metric_names(), validated=validation is not None)
        self._step = factory.train_step(state, rule, data.batch, epoch_metrics=True)
        self._steps_per_epoch = data.steps_per_epoch
        self._actions = actions
        self._observers = observers
        self._validation = validation
        self._monitor = LossMonitor(
            data.steps_per_epoch,
            scalars.step,
            scalars.place_in_data(data.steps_per_epoch) + plan.epoch_offset * data.steps_per_epoch,
            skips=has_dynamic_scale(state.optimizer),
            epoch_sums=(scalars.progress.loss_sum, scalars.progress.loss_weight),
        )
        # A saved step is measured: it is checked before, and no checkpoint holds what is not finite.
        measured = [plan.logged] if actions.save is None else [plan.logged, plan.saved]
        self.loop = TrainingLoop(
            backend,
            state,
            self._step,
            data,
            total_steps=plan.total_steps,
            measured=measured,
            epoch_offset=plan.epoch_offset,
        )
        self._report = TrainingReport(self._step, self._monitor, self.loop.clock, observers)
        self._waiting = WaitingWatch(backend, self.loop.clock, data.remedy)
        self._desync = DesyncCheck(backend, state, rule, scalars.step)
        self._add_hooks(plan)

    def _add_hooks(self, plan: Plan) -> None:
        """Fill the list: what comes first is called first."""
        loop, callbacks = self.loop, self._callbacks
        loop.add_hook(self._note, EVERY_STEP, roll_back=self._rewind)
        if callbacks is not None:
            loop.add_hook_before(self._begin_step)
            if callbacks.needs.batches:
                loop.add_hook(self._show_batch, EVERY_STEP)
        loop.add_hook(self._check_and_log, MEASURED)
        if self._desync.needed:
            loop.add_hook(self._desync, EVERY_STEP)
        loop.add_hook(self._warn_of_waiting, MEASURED)
        if callbacks is not None:
            # A callback that stops within an epoch ends it: its figures are formed like those of any other.
            loop.add_hook(lambda step: None if step.ends_epoch else callbacks.agree(step), MEASURED)
        loop.add_hook(self._end_epoch, EPOCH_ENDS)
        if callbacks is not None:
            loop.add_hook(callbacks.agree, EPOCH_ENDS)
        if self._actions.save is not None:
            loop.add_hook(self._save, plan.saved)
            if plan.best is not None:
                loop.add_hook(self._save_best, EPOCH_ENDS)

    def run(self) -> None:
        """Train as planned.

        Raises:
            NonFiniteError: the loss was NaN or infinite; the message names the step.
        """
        progress = self._state.scalars.progress
        if self._callbacks is not None:
            self._callbacks.begin(progress.callbacks, self._state.held_weights, self._state.weight_paths())
            self._rule.adopt_weights()
        self._step.begin_metrics(progress.metrics)
        # What was restored counts once: a later training with other callbacks begins anew.
        self._state.held_weights = {}
        progress.callbacks, progress.metrics = [], {}
        self.loop.run()
        self._actions.consolidate()
        if self._callbacks is not None:
            self._callbacks.end()
            self._rule.adopt_weights()

    def result(self, *, wall_seconds: float) -> FitResult:
        """Return what the training came to, within `wall_seconds` with what came before the first step."""
        history = None if self._callbacks is None else self._callbacks.history
        return self._report.result(
            self._state.scalars, self._steps_per_epoch, wall_seconds=wall_seconds, history=history
        )

    def _begin_step(self, step: StepEnd) -> None:
        assert self._callbacks is not None, "added only where there are callbacks"
        self._callbacks.begin_step(step)
        if step.first or step.place == 0 or self._callbacks.needs.batches:
            self._rule.adopt_weights()

    def _note(self, step: StepEnd) -> None:
        assert step.result is not None, "hooks follow a step"
        self._monitor.note(step.result.totals)
        self._observers.on_progress(step.number)

    def _rewind(self) -> None:
        scalars, progress = self._state.scalars, self._state.scalars.progress
        self._monitor.rewind(scalars.step, (progress.loss_sum, progress.loss_weight))

    def _show_batch(self, step: StepEnd) -> None:
        assert self._callbacks is not None, "added only where there are callbacks"
        self._callbacks.end_step(step, self._step.metrics_so_far)
        self._rule.adopt_weights()

    def _check_and_log(self, step: StepEnd) -> Outcome:
        """Stop at what is not finite, and log the step."""
        assert step.result is not None
        assert step.result.measured is not None, "logged steps are measured"
        measured = step.result.measured
        scale = None if measured.loss_scale is None else float(measured.loss_scale)
        loss = self._monitor.settle(finite_parameters=bool(measured.finite), loss_scale=scale)
        self._note_progress()
        self._report.log_step(step, measured, loss)
        return Outcome.SKIP if self._monitor.last_skipped else Outcome.CONTINUE

    def _note_progress(self) -> None:
        """Let the state hold what an epoch that is not finished has come to so far."""
        scalars, progress = self._state.scalars, self._state.scalars.progress
        sums = self._monitor.epoch_sums if scalars.step_in_epoch else (0.0, 0.0)
        progress.loss_sum, progress.loss_weight = sums

    def _note_metrics(self) -> None:
        """Let the state hold what the metrics of an epoch that is not finished have counted."""
        if self._actions.save is not None:
            sums = self._step.metric_sums() if self._state.scalars.step_in_epoch else {}
            self._state.scalars.progress.metrics = sums

    def _warn_of_waiting(self, step: StepEnd) -> None:
        warning = self._waiting.look()
        if warning is not None:
            self._observers.on_message(warning)

    def _end_epoch(self, step: StepEnd) -> None:
        """Evaluate what there is to evaluate, and tell the callbacks."""
        self._note_metrics()
        validation = self._validation if self._plan.evaluates(step.epoch) else None
        if validation is not None or self._callbacks is not None:
            self._actions.consolidate()
        logs = self._report.training_figures()
        if validation is not None:
            logs |= self._evaluate(step, validation)
        note_best(self._plan.best, self._state.scalars, step.number, logs)
        self._report.end_epoch(step, logs)
        if self._callbacks is not None:
            self._callbacks.end_epoch(step.epoch, logs)
            self._rule.adopt_weights()

    def _evaluate(self, step: StepEnd, validation: Iterable[Batch]) -> dict[str, Any]:
        """Evaluate, and return the figures with `val_` before their names."""
        callbacks = self._callbacks
        if callbacks is not None:
            callbacks.begin_evaluation()
            # Showing a batch takes an exchange, in which every rank must take part.
            validation = in_step(validation) if callbacks.needs.test_batches else validation
        outcome = self._actions.evaluate(validation, callbacks)
        if callbacks is not None:
            callbacks.end_evaluation(outcome.as_dict())
        return self._report.evaluated(step, outcome)

    def _save_best(self, step: StepEnd) -> None:
        """Save the best epoch, if it ends with this step and is not saved already."""
        best = self._state.scalars.best
        if best is not None and best["step"] == step.number and not self._plan.saved.due(step):
            self._save(step)

    def _save(self, step: StepEnd) -> None:
        assert self._actions.save is not None, "added only where something is saved"
        progress = self._state.scalars.progress
        if not step.ends_epoch:
            self._note_metrics()
        if self._callbacks is not None:
            progress.callbacks = self._callbacks.states()
            self._state.held_weights = self._callbacks.held_weights(self._state.weight_paths())
        self._state.scalars.stopped = step.outcome is Outcome.STOP
        self._actions.consolidate()
        self._actions.save()
        progress.callbacks, progress.metrics, self._state.held_weights = [], {}, {}
