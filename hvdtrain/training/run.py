"""One training under way."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any, TypedDict

from hvdtrain.backends.protocol import gather
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.observability.events import Observer, RunInfo
from hvdtrain.optim.precision import has_dynamic_scale
from hvdtrain.runtime.logs import warn_on_first
from hvdtrain.runtime.stopping import StopAgreement
from hvdtrain.runtime.stragglers import RankTimes, SlowRank, slowest_rank
from hvdtrain.state.callbacks import restore_callbacks
from hvdtrain.state.named_tensors import is_split
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.bad_steps import BadStepPolicy
from hvdtrain.training.callbacks.base import Callback
from hvdtrain.training.callbacks.desync_check import DesyncCheck
from hvdtrain.training.callbacks.epochs import EpochEnds, KerasBatches, KerasStops, Totals
from hvdtrain.training.callbacks.health import BadSteps, DataWait, SameBatches
from hvdtrain.training.callbacks.keras_callbacks import (
    KerasCallbacks,
    callbacks_of_all,
    refuse_copies_of_slices,
    refuse_saves_within_epochs,
    trackers_in,
)
from hvdtrain.training.callbacks.loss_monitor import LossMonitor
from hvdtrain.training.callbacks.parts import Parts
from hvdtrain.training.callbacks.report import FitResult, TrainingReport
from hvdtrain.training.callbacks.saving import BestEpoch, Committing, CompleteState, Saving, Stopping
from hvdtrain.training.clock import StepClock
from hvdtrain.training.compile_settings import compiled_code
from hvdtrain.training.core import TrainerCore
from hvdtrain.training.elastic import Commits
from hvdtrain.training.loop import TrainingLoop
from hvdtrain.training.plan import Plan
from hvdtrain.training.run_info import run_info


class RunArguments(TypedDict, total=False):
    """What a `Run` may be given besides its trainer, data and plan."""

    validation: Iterable[Batch] | None
    callbacks: Sequence[Any]
    verbose: str | int
    observers: Observer | None
    info: RunInfo | None
    save: Callable[[TrainState], object] | None
    stopping: StopAgreement | None
    commits: Commits | None


class Run:
    """One training of a built trainer, from a state that is equal on every rank. Collective.

    Args:
        trainer: its model, state and options are trained.
        data: this replica's batches.
        plan: when to end, log, evaluate and save.
        validation: evaluated at the end of every epoch; None: never.
        callbacks: as for `fit`. After `restore` they continue from their saved state.
        verbose: as for `fit`; what Keras' callbacks are told.
        observers: receive events; rank 0's only.
        info: passed to the observers at the start.
        save: writes the state, possibly in the background (`BackgroundSaver`); called on every rank. None: never.
        stopping: agrees on the step after which a signal stops all ranks, once it is saved; None: never.
        commits: of elastic training, which commits the state every `plan.commit_every` steps.

    Raises:
        CheckpointError: `save` cannot write this state where it is to; before the first step.
        ConfigError: an unsupported callback, or a batch that cannot be divided.
    """

    def __init__(
        self,
        trainer: TrainerCore,
        data: TrainingData,
        plan: Plan,
        *,
        validation: Iterable[Batch] | None = None,
        callbacks: Sequence[Any] = (),
        verbose: str | int = 0,
        observers: Observer | None = None,
        info: RunInfo | None = None,
        save: Callable[[TrainState], object] | None = None,
        stopping: StopAgreement | None = None,
        commits: Commits | None = None,
    ) -> None:
        self._began = time.perf_counter()
        self._trainer = trainer
        self._data: Any = data
        self._plan = plan
        self._validation = validation
        self._observers = observers or Observer()
        self._info = info
        self._save = save
        self._stopping = stopping
        self._commits = commits
        backend, state, rule, factory = trainer.backend, trainer.state, trainer.rule, trainer.factory
        # What cannot be done is refused before anything is said of the run.
        if isinstance(save, BackgroundSaver):
            again = commits is not None and commits.goes_on
            save.files.prepare(state.scalars.step, state.named_tensors(), again=again)
        factory.microbatch_length(data.batch, rule.slices)
        if validation is not None:
            factory.check_evaluation()
        for tracker in trackers_in(callbacks):
            tracker.prepare(state.scalars.step, required=commits is None or not commits.goes_on)
        keras = self._keras_callbacks(callbacks, verbose)
        restore_callbacks(trackers_in(callbacks), state.scalars.progress.callbacks)  # they begin before the others
        self._best = BestEpoch(plan.best, state.scalars, factory.metric_names(), validated=validation is not None)
        step, self._paced = rule.paced(factory.train_step(state, rule, data.batch), data, state)
        self._parts = Parts(
            backend=backend,
            state=state,
            rule=rule,
            step=step,
            plan=plan,
            monitor=self._loss_monitor(raises=keras is None or not keras.needs.ends_on_nan),
            observers=self._observers,
            keras=keras,
            activity=backend.session.link.activity,
        )
        self._clock = StepClock(data.batch, overlapping=backend.capabilities.asynchronous)
        self._report = TrainingReport(self._parts, self._clock)

    def train(self) -> FitResult:
        """Train as planned. Raises BadStepError naming the step if the loss was NaN, infinite or a spike."""
        parts = self._parts
        self._announce()
        if self._commits is not None and (said := self._commits.begin(parts.state, parts.backend)) is not None:
            self._observers.on_message(said)
        try:
            with compiled_code(parts.state.model, eager=self._trainer.eager):
                callbacks = self._callbacks()
                self._begin()
                with parts.activity.training():
                    self._loop(callbacks).run()
                self._end()
        except BaseException:
            # Other ranks may be elsewhere: the optimizer is the model's again, without slots that they hold.
            parts.rule.give_back(whole=False)
            raise
        return self._report.result(
            wall_seconds=time.perf_counter() - self._began,
            slowest=self._slowest_rank(),
        )

    def _callbacks(self) -> list[Callback]:
        """Return what happens between the steps, in this order on every rank."""
        parts, trainer, data, save = self._parts, self._trainer, self._data, self._save
        backend, options, keras, say = parts.backend, trainer.options, parts.keras, self._observers.on_message
        policy = BadStepPolicy(options, backend, parts.state, say)
        desync = DesyncCheck(
            backend, parts.state, parts.rule, first_step=parts.state.scalars.step, every=options.desync_every
        )
        complete = CompleteState(parts)
        rolls_back = options.on_bad_step == "rollback" and isinstance(save, BackgroundSaver)
        saving = Saving(parts, complete, save, best=self._best, desync=desync, rolls_back=rolls_back) if save else None
        commits = Committing(parts, complete, self._commits, backend.session) if self._commits else None
        compared = backend.job_size > 1 and hasattr(data, "content")
        listed: list[Callback | None] = [
            # A step's totals are noted before anything looks at them, and metrics begin before Keras' epoch does.
            Totals(parts),
            # A callback of batches may end the training on a loss that is not finite, before it is an error.
            KerasBatches(parts, keras) if keras else None,
            # Health, before a step is reported, evaluated or saved: no checkpoint holds what was not looked at.
            BadSteps(parts, policy, saving.roll_back if saving and rolls_back else None),
            self._report,
            desync if desync.needed else None,
            SameBatches(backend, lambda: data.content) if compared else None,
            DataWait(backend, self._clock, data.remedy, say),
            # A stop within an epoch ends it, before the end of the epoch is looked at.
            KerasStops(keras, ends=False) if keras else None,
            EpochEnds(
                parts,
                report=self._report,
                policy=policy,
                best=self._best,
                complete=complete if saving or commits else None,
                validation=self._validation,
                evaluate=trainer.evaluate_batches,
            ),
            # What callbacks decide at the end of an epoch is part of what is saved.
            KerasStops(keras, ends=True) if keras else None,
            saving,
            # A job that was told to stop ends once it is saved.
            Stopping(self._stopping) if saving and self._stopping else None,
            # Last: it ends the world where hosts have changed.
            commits,
        ]
        return [each for each in listed if each is not None]

    def _loop(self, callbacks: list[Callback]) -> TrainingLoop:
        parts = self._parts
        return TrainingLoop(
            parts.state,
            parts.step,
            self._paced,
            callbacks,
            plan=self._plan,
            clock=self._clock,
            activity=parts.activity,
            stopping=self._stopping,
            at_once=self._trainer.options.steps_per_execution,
            measures_few=not parts.waits,
            measures_all=any(isinstance(each, KerasBatches) and each.stops_anywhere for each in callbacks),
        )

    def _begin(self) -> None:
        """Give callbacks, metrics and the guard what a resumed training goes on with."""
        parts, state = self._parts, self._parts.state
        progress = state.scalars.progress
        if parts.keras is not None:
            with parts.rule.shown_weights():
                parts.keras.begin(progress.callbacks, state.held_weights, state.weight_paths())
        parts.step.begin_metrics(progress.metrics)
        # Restored values are used once: a later training starts from scratch.
        state.held_weights = {}
        progress.callbacks, progress.metrics = [], {}
        if parts.rule.guard is not None:
            parts.rule.guard.begin(state.scalars.recent_losses)

    def _end(self) -> None:
        """Leave the model as Keras' `fit` does: whole, with its averages if it keeps them."""
        parts, state = self._parts, self._parts.state
        if parts.rule.guard is not None:
            state.scalars.recent_losses = parts.rule.guard.recent()
        parts.rule.consolidate()
        state.average_statistics(parts.backend, parts.rule.trainers)
        parts.rule.finalize()
        if parts.keras is not None:
            parts.keras.end()
            parts.rule.sync_from_model()

    def _keras_callbacks(self, callbacks: Sequence[Any], verbose: str | int) -> KerasCallbacks | None:
        """Return the caller of Keras' callbacks; None if no rank has any. Raises ConfigError for unsupported ones."""
        trainer, plan, scalars = self._trainer, self._plan, self._trainer.state.scalars
        if not trainer.rule.weights_agree:
            refuse_saves_within_epochs(callbacks)
        if is_split(trainer.model):
            refuse_copies_of_slices(callbacks, saves=self._save is not None)
        steps_left = plan.total_steps - scalars.step + scalars.step_in_epoch
        return callbacks_of_all(
            callbacks,
            trainer.model,
            trainer.backend,
            params={
                "epochs": scalars.epoch + plan.epoch_offset + -(-steps_left // self._data.steps_per_epoch),
                "steps": self._data.steps_per_epoch,
                "verbose": verbose if trainer.backend.primary else 0,
            },
            averaged_weights=trainer.rule.averaged_weights,
        )

    def _loss_monitor(self, *, raises: bool) -> LossMonitor:
        trainer, scalars, steps_per_epoch = self._trainer, self._trainer.state.scalars, self._data.steps_per_epoch
        return LossMonitor(
            steps_per_epoch,
            scalars.step,
            scalars.place_in_data(steps_per_epoch) + self._plan.epoch_offset * steps_per_epoch,
            skips=has_dynamic_scale(trainer.optimizer),
            raises=raises,
            early=not trainer.rule.waits_when_measured,
            epoch_sums=(scalars.progress.loss_sum, scalars.progress.loss_weight),
        )

    def _announce(self) -> None:
        """Tell the observers of the run, and warn of what makes it slow or its results others."""
        trainer, data, state = self._trainer, self._data, self._parts.state
        info = self._info or run_info(trainer.backend, state=state, options=trainer.options, data=data, plan=self._plan)
        notes = [*getattr(data, "notes", ()), *trainer.factory.warnings]
        if isinstance(data, SourceTraining) and data.batch > data.source.size:
            notes.append(
                f"note: a batch of {data.batch:,} has more samples than there are, {data.source.size:,}: the rest is "
                "padding, which samples/s counts."
            )
        narrow_outputs = trainer.factory.narrow_outputs
        trainer.announcer.announce(info, state, self._observers, notes, narrow_outputs=narrow_outputs)
        if not self._observers.tells:  # a silent console; what makes results others is said all the same
            for line in trainer.factory.warnings:
                warn_on_first(info.wording(line).removeprefix("warning: "), stacklevel=5)

    def _slowest_rank(self) -> SlowRank | None:
        """Compare what the ranks did alone in their steps. Collective."""
        backend, activity = self._parts.backend, self._parts.activity
        if backend.job_size == 1 or backend.capabilities.asynchronous:
            return None
        mine = RankTimes(
            backend.session.environment.hostname, activity.times.blocks, activity.looks, activity.working_looks
        )
        return slowest_rank([RankTimes.of(theirs) for theirs in gather(backend, asdict(mine))])
