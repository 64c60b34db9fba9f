"""Run `fit` in a job's only world, or in every elastic one."""

import inspect
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoint.agreement import on_primary
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.lock import locked
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
from hvdtrain.observability.wording import plural
from hvdtrain.runtime.interrupts import InterruptWatch
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.session import Session, join_next_world
from hvdtrain.runtime.stopping import StopAgreement, Stopped
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.agreement import check_same_data, described
from hvdtrain.training.backup import Backup, agreed_backup, refuse_both, without_backup
from hvdtrain.training.callbacks.keras_callbacks import go_on_writing, with_trackers
from hvdtrain.training.callbacks.report import FitResult, summary_of
from hvdtrain.training.core import TrainerCore
from hvdtrain.training.elastic import Commits, check_goes_on
from hvdtrain.training.fit_arguments import FitArguments
from hvdtrain.training.plan import Plan
from hvdtrain.training.run import Run
from hvdtrain.training.run_info import console_for


def fit(
    trainer: TrainerCore, arguments: FitArguments, commits: Commits | None = None, commit_every: int | None = None
) -> FitResult:
    """Train in this world, from the newest commit if any. Collective."""
    callbacks, backup = without_backup(arguments.callbacks)
    saved = checkpoint_of(arguments.checkpoint)
    elastic = {} if commits is None else {"elastic": True, "commit_every": commit_every}
    trainer.agree("fit", {**arguments.facts(), "checkpoint": saved, **elastic}, callbacks)
    arguments.check()
    backup = agreed_backup(backup, trainer.backend)
    if backup is not None:
        refuse_both(saved, backup)
        saved = backup.checkpoint
    check(trainer.options, facts=Facts(saves=saved is not None))
    data, validation = _streams(trainer, arguments)
    trainer.build(data)
    if commits is not None and trainer.restore_commit(commits):
        go_on_writing(callbacks)
        goes_on = True
    else:
        goes_on = _begin(trainer, data, arguments.initial_epoch, backup, described_data=saved is not None)
    if isinstance(data, DatasetTraining | GeneratorTraining | RankTraining):
        data.first_epoch = trainer.state.scalars.first_epoch
    plan = _with_checkpoints(arguments.plan(trainer.state.scalars, data.steps_per_epoch), saved)
    plan = replace(plan, commit_every=commit_every)
    observers = with_trackers(console_for(trainer.backend, arguments.verbose), callbacks, trainer.backend)
    try:
        if goes_on and plan.total_steps == trainer.state.scalars.step:
            observers.on_message(_nothing_left(trainer.state.scalars))
        saving = _saving(trainer, saved)
        resumes = backup is not None or (saved is not None and Path(saved.folder) in trainer.resumed)
        stops = _stoppable(saved, trainer.backend.session, trainer.state.scalars, plan.total_steps, resumes=resumes)
        with saving as save, stops as stopping:
            run = Run(
                trainer,
                data,
                plan,
                validation=validation,
                observers=observers,
                save=save,
                callbacks=callbacks,
                verbose=arguments.verbose,
                stopping=stopping,
                commits=commits,
            )
            result = run.train()
        observers.on_end(summary_of(result))
        trainer.rule.give_back(whole=trainer.compiled_by_user)
    finally:
        observers.close()
    if backup is not None and trainer.backend.primary:
        backup.finish()
    return result


def fit_elastically(trainer: TrainerCore, arguments: FitArguments, commit_every: int) -> FitResult:
    """Train in this world and its successors, as ranks leave and join. Collective."""
    session = trainer.backend.session
    check_goes_on(session, trainer.options)
    check(ElasticConfig(elastic=True), trainer.options, facts=Facts(backend=trainer.backend.name))
    _refuse_ranks_own(arguments)
    commits, entered = Commits(), True
    _note_training(session)
    while True:
        try:
            if not entered:
                session = join_next_world(session)
                trainer.enter(session)
                entered = True
            settled = commits.agree("fit(elastic=True)", session)
            commits.settled = settled or [arguments.batch_for(arguments.given(), trainer.backend)]
            result = fit(trainer, _with_batch(arguments, commits.settled[0]), commits, commit_every)
            _note_end(session)
            return result
        except Exception as error:
            if not session.link.leave_world(error):
                raise
            entered = False


def _streams(trainer: TrainerCore, arguments: FitArguments) -> tuple[TrainingData, Iterable[Batch] | None]:
    """Return the batches to train and to evaluate on, once losses and metrics can take their samples."""
    if inspect.isgenerator(arguments.x) and isinstance(trainer.reading, GeneratorTraining | RankTraining):
        trainer.reading.settle()  # the training before may still read the same generator ahead
    data, validation = arguments.streams(trainer.backend, trainer.seed)
    trainer.reading = data
    source = getattr(data, "source", None)
    if source is not None:
        trainer.factory.check(source)
    return data, validation


def _begin(
    trainer: TrainerCore, data: TrainingData, initial_epoch: int, backup: Backup | None, *, described_data: bool
) -> bool:
    """Begin a training, or continue the resumed one; return whether it continues. Collective."""
    restored = None
    if backup is not None:
        on_primary(trainer.backend, backup.refuse_foreign)
        restored = trainer.find_newest(Path(backup.folder))
        if restored is not None:
            trainer.load(restored, goes_on=True)
    if restored is None:  # rank 0 may be the only one that loaded weights: the plan is made from its state
        trainer.broadcast_state()
    scalars = trainer.state.scalars
    goes_on, trainer.goes_on = trainer.goes_on, False
    now = described(data, trainer.seed, trainer.backend) if described_data or goes_on else None
    if goes_on:
        on_primary(trainer.backend, lambda: check_same_data(scalars.data, now))
    else:
        scalars.begin_training(initial_epoch)
        trainer.state.held_weights = {}
    scalars.data = now
    return goes_on


@contextmanager
def _saving(trainer: TrainerCore, checkpoint: Checkpoint | None) -> Iterator[BackgroundSaver | None]:
    """Yield the checkpoint writer of a `fit`, or None."""
    if checkpoint is None:
        yield None
        return
    folder, hours = Path(checkpoint.folder), checkpoint.keep_every_hours
    session = trainer.backend.session
    with locked(folder, trainer.backend, job=session.link.job) as lock:
        kept = int(checkpoint.keep)
        files = Checkpointer(folder, kept, trainer.backend, keep_every_hours=hours, before=lock.renew)
        saver = BackgroundSaver(files, session.control)
        try:
            yield saver
        finally:
            saver.close()


def _nothing_left(scalars: Scalars) -> str:
    """Return the warning that the training is already complete."""
    how = "a callback stopped it" if scalars.stopped else "all of its epochs are trained"
    return (
        f"warning: there is nothing left to train: {how} ({plural(scalars.epoch_of_training, 'epoch')}). "
        "More epochs=N extend it; trainer.restore(folder) in place of resume begins a new training from there."
    )


def _with_checkpoints(plan: Plan, checkpoint: Checkpoint | None) -> Plan:
    """Return `plan` with the save points of `checkpoint`."""
    if checkpoint is None:
        return plan
    every = None if checkpoint.every is None else int(checkpoint.every)
    return replace(plan, checkpoint_every=every, best=checkpoint.metric)


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
def _stoppable(
    checkpoint: Checkpoint | None, session: Session, scalars: Scalars, total_steps: int, *, resumes: bool
) -> Iterator[StopAgreement | None]:
    """Let signals stop the training inside this context; yields None without checkpoints.

    Signals with a handler of the script are left to it. `resumes` says whether the script resumes by itself. Raises
    Stopped: after the last step, which is saved; on every rank.
    """
    if checkpoint is None:
        yield None
        return
    link, folder = session.link, os.fspath(checkpoint.folder)

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
