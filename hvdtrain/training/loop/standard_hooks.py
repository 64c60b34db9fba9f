"""The standard hooks of a training, in one list, and its result."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.given import in_step
from hvdtrain.observability.events import Observer
from hvdtrain.optim.precision import has_dynamic_scale
from hvdtrain.runtime.session import activity_of_rank, host_name
from hvdtrain.runtime.stopping import StopAgreement
from hvdtrain.runtime.stragglers import RankTimes, SlowRank, slowest_rank
from hvdtrain.state.named_tensors import is_split
from hvdtrain.state.scalars import Progress
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.loop.bad_steps import BadStepPolicy
from hvdtrain.training.loop.clock import DataWaitWatch
from hvdtrain.training.loop.desync_check import DesyncCheck
from hvdtrain.training.loop.keras_callbacks import callbacks_of_all, refuse_copies_of_slices, refuse_saves_within_epochs
from hvdtrain.training.loop.loop import (
    EPOCH_ENDS,
    EVERY_STEP,
    MEASURED,
    STOPS,
    Actions,
    Outcome,
    Plan,
    StepEnd,
    TrainingLoop,
)
from hvdtrain.training.loop.loss_monitor import LossMonitor
from hvdtrain.training.loop.report import FitResult, TrainingReport
from hvdtrain.training.loop.saving_hooks import SavingHooks, begin_best, broadcast_metrics, note_best
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.step_factory import KerasStepFactory
from hvdtrain.training.update_rules.base import UpdateRule


class StandardTraining:
    """A loop with the standard hooks: log, check, evaluate, call Keras callbacks, save.

    Args:
        rule: the update rule, which copies weights set by callbacks.
        validation: evaluated at the end of every epoch; None: never.
        stopping: agrees on the step after which a signal stops all ranks, once it is saved; None: never.
        options: name the policy for steps found bad by the rule's guard, and the steps between two desync checks.

    Raises:
        ConfigError: an unsupported callback.
    """

    def __init__(
        self,
        *,
        backend: Backend,
        state: TrainState,
        factory: KerasStepFactory,
        rule: UpdateRule,
        data: TrainingData,
        plan: Plan,
        actions: Actions,
        observers: Observer,
        validation: Iterable[Batch] | None = None,
        callbacks: Sequence[Any] = (),
        verbose: str | int = 0,
        stopping: StopAgreement | None = None,
        options: StepOptions,
    ) -> None:
        if not rule.weights_agree:
            refuse_saves_within_epochs(callbacks)
        if is_split(state.model):
            refuse_copies_of_slices(callbacks, saves=actions.save is not None)
        self._backend = backend
        self._state = state
        self._data: Any = data
        self._rule = rule
        scalars = state.scalars
        steps_left = plan.total_steps - scalars.step + scalars.step_in_epoch
        self._callbacks = callbacks_of_all(
            callbacks,
            state.model,
            backend,
            params={
                "epochs": scalars.epoch + plan.epoch_offset + -(-steps_left // data.steps_per_epoch),
                "steps": data.steps_per_epoch,
                "verbose": verbose if backend.primary else 0,
            },
            averaged_weights=rule.averaged_weights,
        )
        self._ends_on_nan = self._callbacks is not None and self._callbacks.needs.ends_on_nan
        waits = backend.capabilities.asynchronous or rule.waits_when_measured
        # Any step may be made the last one, which is checked and logged, by a callback that acts after batches.
        self._stops_after_batches = self._callbacks is not None and self._callbacks.needs.weights and not waits
        self._plan = plan
        self._activity = activity_of_rank()
        begin_best(plan.best, scalars, factory.metric_names(), validated=validation is not None)
        self._step, paced = rule.paced(factory.train_step(state, rule, data.batch), data, state)
        self._actions = actions
        self._observers = observers
        self._validation = validation
        self._monitor = LossMonitor(
            data.steps_per_epoch,
            scalars.step,
            scalars.place_in_data(data.steps_per_epoch) + plan.epoch_offset * data.steps_per_epoch,
            skips=has_dynamic_scale(state.optimizer),
            raises=not self._ends_on_nan,
            early=not rule.waits_when_measured,
            epoch_sums=(scalars.progress.loss_sum, scalars.progress.loss_weight),
        )
        # A saved step is measured, and so checked before: no checkpoint holds non-finite values.
        measured = [plan.logged, *([plan.saved] if actions.save else ()), *([plan.committed] if actions.commit else ())]
        if self._ends_on_nan:
            measured.append(EVERY_STEP)  # the training ends after the step
        self.loop = TrainingLoop(
            backend,
            state,
            self._step,
            paced,
            total_steps=plan.total_steps,
            measured=measured,
            epoch_offset=plan.epoch_offset,
            until_epoch=plan.until_epoch,
            activity=self._activity,
            stopping=stopping,
            measures_few=not waits,
            measures_all=self._stops_after_batches,
        )
        self._stopping = stopping
        self._desync = DesyncCheck(
            backend=backend, state=state, rule=rule, first_step=scalars.step, every=options.desync_every
        )
        self._saves = None
        if actions.save is not None or actions.commit is not None:
            self._saves = SavingHooks(
                backend,
                state=state,
                plan=plan,
                rule=rule,
                step=self._step,
                actions=actions,
                callbacks=self._callbacks,
                activity=self._activity,
                desync=self._desync,
            )
        self._report = TrainingReport(self._step, self._monitor, self.loop.clock, observers)
        self._waiting = DataWaitWatch(backend, self.loop.clock, data.remedy)
        self._bad_steps = BadStepPolicy(options, backend, state, observers.on_message)
        self._add_hooks()

    def _add_hooks(self) -> None:
        """Register the hooks, in calling order."""
        loop, callbacks = self.loop, self._callbacks
        loop.add_hook(self._note, EVERY_STEP)
        loop.add_hook_before(self._begin_epoch)
        if callbacks is not None:
            loop.add_hook_before(self._begin_step)
            if callbacks.needs.batches:
                loop.add_hook(self._show_batch, EVERY_STEP)
        loop.add_hook(self._check_and_log, MEASURED)
        if self._desync.needed:
            loop.add_hook(self._desync, EVERY_STEP)
        if self._backend.job_size > 1 and hasattr(self._data, "content"):
            loop.add_hook(self._compare_batches, MEASURED)
        loop.add_hook(self._warn_of_waiting, MEASURED)
        if callbacks is not None:
            # A callback that stops within an epoch ends it, with metrics like any other epoch.
            loop.add_hook(lambda step: None if step.ends_epoch else callbacks.agree(step), MEASURED)
        loop.add_hook(self._end_epoch, EPOCH_ENDS)
        if callbacks is not None:
            loop.add_hook(callbacks.agree, EPOCH_ENDS)
        if self._saves is not None:
            self._saves.add_saves(loop)
        if self._actions.save is not None:
            loop.add_hook(self._stop, STOPS)
        if self._saves is not None:
            self._saves.add_commits(loop)

    def run(self) -> None:
        """Train as planned. Raises BadStepError naming the step if the loss was NaN, infinite or a spike."""
        progress = self._state.scalars.progress
        if self._callbacks is not None:
            with self._rule.shown_weights():
                self._callbacks.begin(progress.callbacks, self._state.held_weights, self._state.weight_paths())
        self._step.begin_metrics(progress.metrics)
        # Restored values are used once: a later training starts from scratch.
        self._state.held_weights = {}
        progress.callbacks, progress.metrics = [], {}
        if self._rule.guard is not None:
            self._rule.guard.begin(self._state.scalars.recent_losses)
        with self._activity.training():
            if self._saves is not None:
                self._saves.begin()
            self.loop.run()
        if self._rule.guard is not None:
            self._state.scalars.recent_losses = self._rule.guard.recent()
        self._rule.consolidate()
        self._state.average_statistics(self._backend, self._rule.trainers)
        self._rule.finalize()
        if self._callbacks is not None:
            self._callbacks.end()
            self._rule.sync_from_model()

    def result(self, *, wall_seconds: float) -> FitResult:
        """Return the result of the training. Collective."""
        history = None if self._callbacks is None else self._callbacks.history
        return self._report.result(
            self._state.scalars,
            wall_seconds=wall_seconds,
            history=history,
            guarded=self._rule.guard is not None,
            slowest=self._slowest_rank(),
            of_rule=self._rule.figures,
        )

    def _slowest_rank(self) -> SlowRank | None:
        """Compare what the ranks did alone in their steps. Collective."""
        if self._backend.job_size == 1 or self._backend.capabilities.asynchronous:
            return None
        activity = self._activity
        mine = RankTimes(host_name(), activity.times.blocks, activity.looks, activity.working_looks)
        return slowest_rank([RankTimes.of(theirs) for theirs in gather(self._backend, asdict(mine))])

    def _begin_epoch(self, step: StepEnd) -> None:
        """Reset the metrics where Keras does: what callbacks evaluated since is not of this epoch."""
        if step.place == 0 and not step.first:
            self._step.begin_metrics()
        if step.place == 0:
            self._monitor.begin_epoch(step.number, step.epoch)
        self._state.counts_epoch = True

    def _begin_step(self, step: StepEnd) -> None:
        assert self._callbacks is not None, "added only where there are callbacks"
        if self._callbacks.needs.batches and step.place > 0:
            self._step.show_metrics()
        looked_at = step.first or step.place == 0 or self._callbacks.needs.batches
        with self._rule.shown_weights() if looked_at else nullcontext():
            self._callbacks.begin_step(step)

    def _note(self, step: StepEnd) -> None:
        assert step.result is not None, "hooks follow a step"
        self._monitor.note(step.result.totals, step.result.here)
        self._observers.on_progress(step.number)

    def _show_batch(self, step: StepEnd) -> Outcome | None:
        assert self._callbacks is not None, "added only where there are callbacks"
        if self._callbacks.needs.weights:
            self._state.average_statistics(self._backend, self._rule.trainers)
        self._step.show_metrics()
        with self._rule.shown_weights():
            self._callbacks.end_step(step, self._step.results_of_step)
        if not self._stops_after_batches or step.measured or step.ends_epoch:
            return None  # the callbacks agree later
        outcome = self._callbacks.agree(step)
        step.measured = outcome is Outcome.STOP  # checked and logged, as the last step
        return outcome

    def _check_and_log(self, step: StepEnd) -> None:
        """Handle non-finite values, and log the step."""
        assert step.result is not None
        assert step.result.measured is not None, "logged steps are measured"
        measured = step.result.measured
        scale = None if measured.loss_scale is None else float(measured.loss_scale)
        finite, curable = bool(measured.finite), self._actions.roll_back is not None
        loss = self._monitor.settle(finite_parameters=finite or curable, loss_scale=scale)
        bad = self._monitor.pop_bad_steps()
        if self._bad_steps.settle(bad, finite_parameters=finite, where=f"step {step.number}"):
            self._roll_back(step)
        self._note_progress()
        self._report.log_step(step, measured, loss)

    def _roll_back(self, step: StepEnd) -> None:
        """Continue from the newest good checkpoint, discarding the batches since then."""
        assert self._saves is not None, "the policy asks for it only where there are checkpoints"
        saved = self._saves.roll_back()
        scalars = self._state.scalars
        same_epoch = saved.epoch == step.epoch - self._plan.epoch_offset
        progress = saved.progress if same_epoch else Progress()
        self._monitor.rewind(scalars.step, (progress.loss_sum, progress.loss_weight))
        self._step.begin_metrics(progress.metrics)
        if self._rule.guard is not None:
            self._rule.guard.begin(saved.recent_losses)
        self._bad_steps.note_rollback(saved.step, step.number)

    def _note_progress(self) -> None:
        """Store the running totals of an unfinished epoch in the state."""
        scalars, progress = self._state.scalars, self._state.scalars.progress
        sums = self._monitor.epoch_sums if scalars.step_in_epoch else (0.0, 0.0)
        progress.loss_sum, progress.loss_weight = sums

    def _compare_batches(self, step: StepEnd) -> None:
        """Compare what Python gave the ranks since the start. Collective. Raises DataError."""
        everyone = gather(self._backend, self._data.content)
        for rank, content in enumerate(everyone):
            if content != everyone[0]:
                raise DataError(
                    f"By step {step.number} rank {rank} was given other batches than rank 0, so samples are lost and "
                    "repeated. What draws in the data, such as a shuffle in on_epoch_end(), needs a generator of its "
                    "own with the same seed on every rank, self.rng = np.random.default_rng(seed), and must draw "
                    'nothing else from it. If each rank is to train on batches of its own, pass shard="rank".'
                )

    def _warn_of_waiting(self, step: StepEnd) -> None:
        warning = self._waiting.look()
        if warning is not None:
            self._observers.on_message(warning)

    def _end_epoch(self, step: StepEnd) -> None:
        """Evaluate if due, and call the callbacks."""
        if self._saves is not None:
            self._saves.note_metrics()
        validation = self._validation if self._plan.evaluates(step.epoch) else None
        if self._callbacks is not None:
            self._rule.consolidate()
        elif validation is not None:
            self._rule.prepare_to_evaluate()
        if self._callbacks is not None or validation is not None:
            self._state.average_statistics(self._backend, self._rule.trainers)
        logs = self._report.training_metrics()
        self._state.counts_epoch = False
        if self._rule.guard is not None:
            logs["bad_steps"] = self._bad_steps.end_epoch()
        if validation is not None:
            logs |= self._evaluate(step, validation)
        logs = broadcast_metrics(logs, self._backend)
        before = self._state.scalars.best
        note_best(self._plan.best, self._state.scalars, step.number, logs)
        if self._saves is not None:
            self._saves.note_best(before)
        self._report.end_epoch(step, logs)
        if self._callbacks is not None:
            self._callbacks.end_epoch(step.epoch, logs)
            self._rule.sync_from_model()

    def _evaluate(self, step: StepEnd, validation: Iterable[Batch]) -> dict[str, Any]:
        """Evaluate, and return the metrics prefixed by `val_`."""
        callbacks = self._callbacks
        if callbacks is not None:
            callbacks.begin_evaluation()
            # Showing a batch takes an exchange, in which every rank must take part.
            validation = in_step(validation) if callbacks.needs.test_batches else validation
        with self._activity.during("evaluation"):
            outcome = self._actions.evaluate(validation, callbacks)
        if callbacks is not None:
            callbacks.end_evaluation(outcome.as_dict())
        return self._report.evaluated(step, outcome)

    def _stop(self, step: StepEnd) -> None:
        """Exit after a saved step; a training that is complete anyway ends normally."""
        assert self._stopping is not None, "only it lets a step stop"
        if not step.last:
            raise self._stopping.stopped()
