"""Run `fit` in a job's only world, or in every elastic one."""

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.compat.keras_variables import forget_slots
from hvdtrain.config.checkpoint import Checkpoint, checkpoint_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.config.runtime import ElasticConfig
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.dataset_batches import DatasetTraining
from hvdtrain.data.streams.python_batches import GeneratorTraining
from hvdtrain.data.streams.rank_parts import RankTraining
from hvdtrain.observability.events import Observer, RunInfo
from hvdtrain.optim.averaging import innermost
from hvdtrain.runtime.interrupts import InterruptWatch
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.session import Session, current, join_next_world
from hvdtrain.runtime.stopping import StopAgreement, Stopped
from hvdtrain.state.scalars import Scalars
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.keras_callbacks import go_on_writing
from hvdtrain.training.callbacks.report import FitResult, summary_of
from hvdtrain.training.elastic import Commits, check_goes_on
from hvdtrain.training.fit_arguments import FitArguments
from hvdtrain.training.plan import Plan
from hvdtrain.training.resumable import (
    ResumableTrainer,
    agreed_backup,
    nothing_left,
    refuse_both,
    with_checkpoints,
    without_backup,
)
from hvdtrain.training.run import Run
from hvdtrain.training.run_info import console_for


class FittingTrainer(ResumableTrainer):
    """Adds `fit` to the trainer; base of `Trainer`."""

    _reading: TrainingData | None = None
    """The data of the last `fit`."""

    def _fit(
        self, arguments: FitArguments, commits: Commits | None = None, commit_every: int | None = None
    ) -> FitResult:
        """Train in this world, from the newest commit if any."""
        callbacks, backup = without_backup(arguments.callbacks)
        saved = checkpoint_of(arguments.checkpoint)
        elastic = {} if commits is None else {"elastic": True, "commit_every": commit_every}
        self._agree("fit", {**arguments.facts(), "checkpoint": saved, **elastic}, callbacks)
        arguments.check()
        backup = agreed_backup(backup, self.backend)
        if backup is not None:
            refuse_both(saved, backup)
            saved = backup.checkpoint
        check(self.options, facts=Facts(saves=saved is not None))
        if inspect.isgenerator(arguments.x) and isinstance(self._reading, GeneratorTraining | RankTraining):
            self._reading.settle()  # the training before may still read the same generator ahead
        data, validation = arguments.streams(self.backend, self._seed)
        self._reading = data
        source = getattr(data, "source", None)
        if source is not None:
            self.factory.check(source)
        self.build(data)
        if commits is not None and self.restore_commit(commits):
            go_on_writing(callbacks)
            goes_on = True
        else:
            goes_on = self._begin_fit(data, arguments.initial_epoch, backup, described_data=saved is not None)
        if isinstance(data, DatasetTraining | GeneratorTraining | RankTraining):
            data.first_epoch = self.state.scalars.first_epoch
        plan = with_checkpoints(arguments.plan(self.state.scalars, data.steps_per_epoch), saved)
        plan = replace(plan, commit_every=commit_every)
        observers = console_for(self.backend, arguments.verbose)
        try:
            if goes_on and plan.total_steps == self.state.scalars.step:
                observers.on_message(nothing_left(self.state.scalars))
            saving = self._saving(saved)
            resumes = backup is not None or (saved is not None and Path(saved.folder) in self._asked_for)
            stops = stoppable(saved, self.state.scalars, plan.total_steps, resumes=resumes)
            with saving as save, stops as stopping:
                run = Run(
                    self,
                    data,
                    plan,
                    validation=validation,
                    observers=observers,
                    save=save,
                    keras_callbacks=callbacks,
                    verbose=arguments.verbose,
                    stopping=stopping,
                    commits=commits,
                )
                result = run.train()
            observers.on_end(summary_of(result))
            self.rule.give_back(whole=self._compiled_by_user)
        finally:
            observers.close()
        if backup is not None and self.backend.primary:
            backup.finish()
        return result

    def train(
        self,
        data: TrainingData,
        plan: Plan,
        *,
        validation: Iterable[Batch] | None = None,
        observers: Observer | None = None,
        info: RunInfo | None = None,
        save: Callable[[TrainState], object] | None = None,
        callbacks: Sequence[Any] = (),
        stopping: StopAgreement | None = None,
        commits: Commits | None = None,
        restored: bool = False,
    ) -> FitResult:
        """Broadcast rank 0's state and train until `plan.total_steps`. Collective.

        Arguments are those of `Run`, and `restored`: whether a checkpoint or a commit was restored just before, so that
        all ranks have this state.

        Raises:
            CheckpointError: `save` cannot write this state where it is to; before the first step.
            ConfigError: as `fit`; or a restored callback has lost its best weights (`restore_best_weights=True`).
        """
        check(self.options, facts=Facts(saves=isinstance(save, BackgroundSaver)))
        sizes = {"data.batch": data.batch, "data.steps_per_epoch": data.steps_per_epoch}
        self._agree("train", {"plan": plan, **sizes, "validation": validation, "save": save}, callbacks)
        if not restored:
            self.broadcast_state()
        run = Run(
            self,
            data,
            plan,
            validation=validation,
            keras_callbacks=callbacks,
            observers=observers,
            info=info,
            save=save,
            stopping=stopping,
            commits=commits,
        )
        return run.train()

    def _fit_elastically(self, arguments: FitArguments, commit_every: int) -> FitResult:
        """Train in this world and its successors, as ranks leave and join."""
        check_goes_on(current(), self.options)
        check(ElasticConfig(elastic=True), self.options, facts=Facts(backend=self.backend.name))
        _refuse_ranks_own(arguments)
        commits, entered = Commits(), True
        _note_training(current())
        while True:
            try:
                if not entered:
                    self._enter(join_next_world(current()))
                    entered = True
                settled = commits.agree("fit(elastic=True)", current())
                commits.settled = settled or [arguments.batch_for(arguments.given(), self.backend)]
                result = self._fit(_with_batch(arguments, commits.settled[0]), commits, commit_every)
                _note_end(current())
                return result
            except Exception as error:
                if not current().link.leave_world(error):
                    raise
                entered = False

    def _enter(self, session: Session) -> None:
        """Rebuild the trainer for a new world; model and optimizer are kept."""
        scalars = None if self._state is None else asdict(self._state.scalars)
        self.backend = backend_for(session)
        if self._rule is not None and self._rule.waits_when_measured:
            forget_slots(innermost(self.optimizer))  # other ranks will hold them; the commit has all
        self._assemble()
        self._scalars_before = scalars


def _with_batch(arguments: FitArguments, batch: int | None) -> FitArguments:
    """Return the arguments with the first world's global batch; None for batched data."""
    return arguments if batch is None else replace(arguments, batch=batch, batch_size=None)


def _note_training(session: Session) -> None:
    """Mark the start of the script's one elastic training. Raises ConfigError if there was one before."""
    worlds = session.link.worlds
    assert worlds is not None, "checked before"
    if worlds.trained:
        raise ConfigError(
            "One fit of a script is elastic: a rank that joins begins with the first one. Received: a second "
            "fit(elastic=True). Leave out elastic=True here, or use one script for each."
        )
    worlds.trained = worlds.training = True


def _note_end(session: Session) -> None:
    """Mark the end of elastic training: no further world resumes from here."""
    assert session.link.worlds is not None, "it was elastic"
    session.link.worlds.training = False


def _refuse_ranks_own(arguments: FitArguments) -> None:
    """Reject per-rank data, lost with a rank and missing on others (ConfigError)."""
    if arguments.shard is not None:
        raise ConfigError(
            f"fit(shard={arguments.shard!r}) does not go with elastic=True: a rank's part of the data would "
            "be lost with it. Give every rank all of the data."
        )
    if inspect.isgenerator(arguments.x):
        raise ConfigError("fit(elastic=True) restarts the data in each world: pass the function, not its generator.")


@contextmanager
def stoppable(
    checkpoint: Checkpoint | None, scalars: Scalars, total_steps: int, *, resumes: bool
) -> Iterator[StopAgreement | None]:
    """Let signals stop the training inside this context; yields None without checkpoints.

    Signals with a handler of the script are left to it. `resumes` says whether the script resumes by itself. Raises
    Stopped: after the last step, which is saved; on every rank.
    """
    if checkpoint is None:
        yield None
        return
    session, folder = current(), os.fspath(checkpoint.folder)
    link = session.link

    def message() -> str:
        where = f"interrupted at step {scalars.step} of {total_steps}"
        if resumes:
            return f"{where}. The script resumes from the newest checkpoint in {folder!r} when it is run again."
        return f"{where}. trainer.resume({folder!r}) before fit resumes from the newest checkpoint in it."

    def failed() -> bool:
        return bool(link.control.failures())

    stopping = link.stoppable(scalars.step, grace=checkpoint.grace_seconds, ranks=session.control.size)
    try:
        with (
            stopping as agreement,
            InterruptWatch(lambda: session.environment, message, failed, stop=link.request_stop),
        ):
            yield agreement
    except Stopped:
        if session.world.primary:
            LOGGER.info(message())
        raise
    if agreement.asked_here is not None:
        os.kill(os.getpid(), agreement.asked_here)  # arrived after the last step: the training is complete and saved
