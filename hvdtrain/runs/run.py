"""A run from its configuration: what `train` does on every rank."""

from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.index import read_index
from hvdtrain.checkpoint.lock import FolderLock, locked
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.config.run import Config
from hvdtrain.data.identity import Identity, check_same_samples, identity_of
from hvdtrain.data.pipeline import SourceTraining, check_passes
from hvdtrain.models.registry import model_family
from hvdtrain.observability.events import Observer
from hvdtrain.runs.description import describe_run
from hvdtrain.runs.folder import RunFolder, create, opened
from hvdtrain.runs.resume import (
    Resume,
    interrupted,
    is_finished,
    settle_processes,
    stretched_schedule,
)
from hvdtrain.runs.run_data import RunData, left_out, run_data
from hvdtrain.runs.run_files import (
    StartFiles,
    callbacks_of,
    info_of,
    left_out_line,
    observers_of,
    run_figures,
    summary_of_run,
    write_end,
    write_start,
)
from hvdtrain.runs.trainers import run_trainer
from hvdtrain.runs.tuning import student_of
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.session import Session
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.callbacks.keras_callbacks import with_trackers
from hvdtrain.training.elastic import Commits, check_goes_on
from hvdtrain.training.plan import Plan
from hvdtrain.training.trainer import Trainer


def train(
    session: Session,
    config: Config,
    path: Path,
    *,
    resume: Resume = "no",
    start: Path | None = None,
    commits: Commits | None = None,
) -> dict[str, Any]:
    """Train as `config` says, write the run's folder, and return its summary (the same on every rank).

    Args:
        session: this rank's part in the job.
        config: the whole configuration, the same on every rank.
        path: the run's folder; rank 0 makes it and writes into it.
        resume: whether to continue from the newest good checkpoint in it.
        start: the folder in which relative paths of `config` begin; None: the working folder.
        commits: of an elastic training; those left of an earlier world are continued from.

    Raises:
        UserError: options, data or a checkpoint that cannot be used.
    """
    backend = backend_for(session)
    with locked(path, backend, "--run-dir {folder} cannot be created", job=session.link.job) as lock:
        begins = commits is None or not commits.goes_on
        if resume == "auto" and begins and is_finished(RunFolder(path), config, backend):
            return {}
        return _train(
            session,
            backend=backend,
            config=config,
            path=path,
            lock=lock,
            resume=resume,
            start=start,
            commits=commits,
        )


def _train(
    session: Session,
    backend: Backend,
    config: Config,
    path: Path,
    lock: FolderLock,
    resume: Resume,
    start: Path | None,
    commits: Commits | None,
) -> dict[str, Any]:
    if commits is not None:
        check_goes_on(session, config.update)
        check(config, facts=Facts(backend=backend.name))
    callbacks = callbacks_of(config)
    source = run_data(config, backend)
    data = source.training
    plan = _plan(config, data.steps_per_epoch)
    check_passes(data, plan.total_steps)
    folder, kept = RunFolder(path), config.checkpoint
    begun = StartFiles(folder, lock)
    checkpoints = Checkpointer(
        folder.checkpoints, kept.keep, backend, keep_every_hours=kept.keep_every_hours, before=begun.restore
    )
    committed = commits is not None and commits.of_any(backend)
    newest = None if resume == "no" or committed else checkpoints.find_to_go_on()
    trainer = run_trainer(config, source, backend, goes_on=committed or newest is not None)
    trainer.build(data)
    restored, warning = _begin(trainer, newest, source, config=config, path=path, resume=resume, commits=commits)
    _check_steps(config, trainer.state.scalars.step, plan.total_steps, finished=resume == "auto")
    if config.observability.rank_logs:
        _log_to_file(session, folder, trainer.state.scalars.step)
    figures = run_figures(trainer, folder, session)
    info = info_of(config, data=data, plan=plan, trainer=trainer, folder=folder)

    def note_left_out(state: TrainState) -> None:
        state.scalars.left_out = {str(number): text for number, text in left_out(data).items()}

    first, ends = backend.primary, (plan.total_steps, session.environment)
    session.link.on_interrupt = lambda: interrupted(folder, trainer.state.scalars.step, *ends)
    with ExitStack() as during:
        observers = observers_of(config, session=session, folder=folder, figures=figures) if first else Observer()
        observers = with_trackers(observers, callbacks, backend)
        during.enter_context(closing(observers))
        saver = during.enter_context(closing(BackgroundSaver(checkpoints, session.control, note_left_out)))
        if first:
            loss = model_family(config.model).loss()
            description = describe_run(config.data, source.splits, student_of(trainer.model), loss)
            write_start(folder, config, description, start or Path.cwd())
            begun.remember()
        if warning is not None:
            observers.on_message(warning)
        ranks = session.control.size
        with session.link.stoppable(info.start_step, grace=kept.grace_seconds, ranks=ranks) as stopping:
            result = trainer.train(
                data,
                plan,
                restored=restored,
                validation=source.validation,
                callbacks=callbacks,
                observers=observers,
                info=info,
                save=saver,
                stopping=stopping,
                commits=commits,
            )
        summary = summary_of_run(config, session=session, trainer=trainer, result=result, resumed_from=info.start_step)
        if isinstance(data, SourceTraining) and data.bad.tolerated:
            data.bad.share()  # collective
            if line := left_out_line(source.bad, folder.summary.name):
                observers.on_message(line)
            summary |= {"bad_records": len(source.bad), "left_out": source.bad}
        if commits is not None:
            summary["worlds"] = [asdict(world) for world in commits.worlds]
        if first:
            write_end(folder, config=config, trainer=trainer, summary=summary, begun=begun)
        observers.on_end(summary)
    return summary


def _begin(
    trainer: Trainer,
    newest: Path | None,
    source: RunData,
    *,
    config: Config,
    path: Path,
    resume: Resume,
    commits: Commits | None,
) -> tuple[bool, str | None]:
    """Restore a commit or a checkpoint, or make the folder of a new run. Collective.

    Returns:
        Whether all ranks have a restored state; on rank 0 a warning of the schedule, if any.
    """
    backend, data, identity, warning = trainer.backend, source.training, identity_of(source.loaded), None
    restored = commits is not None and trainer.restore_commit(commits)
    if newest is not None:
        warning = _resume(trainer, newest=newest, identity=identity, config=config, path=path)
    elif resume == "yes" and not restored:
        raise CheckpointError(
            f"--resume takes a run with a checkpoint. Received: {path}, which has none. Start a new run, or start "
            f"this one again by its first command and --resume auto."
        )
    elif resume == "no" and (commits is None or not commits.goes_on):
        if backend.primary:
            create(path)
        gather(backend, True)  # before another rank's log is in it
    scalars = trainer.state.scalars
    scalars.data = identity
    settle_processes(scalars, data, backend.processes, path)
    if isinstance(data, SourceTraining):
        data.bad.recall(scalars.left_out)
    return restored or newest is not None, warning


def _log_to_file(session: Session, folder: RunFolder, begun: int) -> None:
    """Log to the run's folder as well, on this rank's host: it need not be one that the primary sees."""
    environment = session.environment
    file = folder.logs / f"rank-{environment.rank}.log"
    heading = f"rank {environment.rank} of {environment.size} on {environment.hostname}, after step {begun}"
    try:
        session.link.log.start(file, heading)
    except OSError as error:
        LOGGER.warning(f"{file} cannot be written: {error.strerror}. The run goes on without it.")


def _resume(trainer: Trainer, newest: Path, identity: Identity, config: Config, path: Path) -> str | None:
    """Restore a checkpoint, if its run had the same samples; return, on rank 0, a warning of the schedule."""
    earlier = opened(path, "--resume")[1] if trainer.backend.primary else None
    if earlier is not None:
        # Before the tensors are looked at: other data may make another model.
        check_same_samples(read_index(newest).scalars["data"], identity, path)
    trainer.load(newest, goes_on=True)
    return stretched_schedule(config, earlier) if earlier is not None else None


def _plan(config: Config, steps_per_epoch: int) -> Plan:
    total = config.training.epochs * steps_per_epoch
    return Plan(
        total_steps=min(total, config.training.max_steps or total),
        log_every=config.observability.log_every,
        checkpoint_every=config.checkpoint.checkpoint_every,
        commit_every=config.elastic.commit_every if config.elastic.elastic else None,
        best=config.checkpoint.best,
    )


def _check_steps(config: Config, done: int, total: int, *, finished: bool) -> None:
    """Refuse a run without steps left, unless it may be `finished`, and a profile of steps that it does not take.

    Raises:
        ConfigError: naming them.
    """
    if done >= total and not finished:
        raise ConfigError(
            f"The run has finished {done} steps and is to end at {total}: there is nothing left to train. "
            "--epochs or --max-steps extend it."
        )
    reported = config.observability
    trace = reported.trace
    if trace is not None and trace.steps is not None and not done < trace.steps[0] <= trace.steps[1] <= total:
        raise ConfigError(
            f"--profile {reported.profile} names steps that this run does not take: it goes from step {done + 1} to "
            f"{total}. Name some of these."
        )
