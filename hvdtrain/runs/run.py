"""A run from its configuration: what `train` does on every rank."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, TextIO

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint.background import BackgroundSaver
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.lock import FolderLock, locked
from hvdtrain.checkpoint.manifest import scalars_of
from hvdtrain.config.errors import ConfigError, on_command_line
from hvdtrain.config.observability import trace_config
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.identity import Identity, identity_of
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.data.shapes import check_shapes
from hvdtrain.data.splits import DataSplits
from hvdtrain.models.registry import build_model, layout_rules, model_family
from hvdtrain.observability.console import make_console
from hvdtrain.observability.events import BaseObserver, Observer, Observers, RunInfo
from hvdtrain.observability.jsonl import JsonlWriter
from hvdtrain.observability.prometheus import open_exporter
from hvdtrain.observability.status import StatusWriter, cause_of
from hvdtrain.observability.tensorboard import TensorBoardWriter
from hvdtrain.observability.wording import plural
from hvdtrain.optim.optimizers import build_optimizer
from hvdtrain.optim.scaling import describe_rate
from hvdtrain.parallel.parallelize import parallelize
from hvdtrain.runs.describe import describe_run
from hvdtrain.runs.folder import RunFolder, create, opened
from hvdtrain.runs.interrupted import interrupted
from hvdtrain.runs.live_figures import run_figures
from hvdtrain.runs.rank_logs import rank_logs
from hvdtrain.runs.resume import (
    Resume,
    check_samples,
    is_finished,
    newest_of_run,
    settle_processes,
    stretched_schedule,
)
from hvdtrain.runs.run_data import RunData, left_out, run_data
from hvdtrain.runs.run_files import summary_of_run, write_end, write_start
from hvdtrain.runs.start_files import StartFiles
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.stopping import Stopped
from hvdtrain.runtime.terminal import on_terminal
from hvdtrain.training.elastic import Commits, check_elastic
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.objective.soft_labels import soft_label_loss, soft_label_metrics
from hvdtrain.training.options import StepOptions, step_options
from hvdtrain.training.run_info import who_trains
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
        resume: whether to go on from the newest good checkpoint in it.
        start: the folder in which relative paths of `config` begin; None: the working folder.
        commits: of an elastic training; those that are left of an earlier world are gone on from.

    Raises:
        UserError: options, data or a checkpoint that cannot be used.
    """
    backend = backend_for(session)
    refusal = "--run-dir {folder} cannot be created"
    with locked(path, backend, refusal, job=session.link.job) as lock, ExitStack() as closing:
        begins = commits is None or not commits.goes_on
        if resume == "auto" and begins and is_finished(RunFolder(path), config, backend):
            return {}
        return _train(session, backend, config, path, lock, resume, start, commits, closing)


def _train(
    session: Session,
    backend: Backend,
    config: Config,
    path: Path,
    lock: FolderLock,
    resume: Resume,
    start: Path | None,
    commits: Commits | None,
    closing: ExitStack,
) -> dict[str, Any]:
    if commits is not None:
        check_elastic(session, backend.name, step_options(_step_options(config)), config.data.shard_by)
    source = run_data(config, backend)
    data = source.training
    plan = _plan(config, data.steps_per_epoch)
    trainer = run_trainer(config, source, backend)
    trainer.build(data)
    folder, first = RunFolder(path), backend.primary
    kept = config.checkpoint
    begun = StartFiles(folder, lock)
    hours = kept.keep_every_hours
    checkpoints = Checkpointer(folder.checkpoints, kept.keep, backend, keep_every_hours=hours, before=begun.restore)
    identity, stretched = identity_of(source.loaded), None
    restored = commits is not None and commits.restore(trainer.state, backend)
    newest = None if resume == "no" or restored else newest_of_run(checkpoints, path, resume)
    if newest is not None:
        stretched = _resume(trainer, newest, identity, config, path)
    elif first and resume == "no" and (commits is None or not commits.goes_on):
        create(path)
    trainer.state.scalars.data = identity
    trainer.broadcast_state()
    settle_processes(trainer.state.scalars, data, backend.processes, path)
    if isinstance(data, SourceTraining):
        data.bad.recall(trainer.state.scalars.left_out)
    if resume != "auto":
        _refuse_finished(trainer, plan)
    _check_profile(config, trainer, plan)
    log = closing.enter_context(rank_logs(session, folder, trainer.state.scalars.step))
    status = StatusWriter(folder.status, elastic=commits is not None)
    figures = run_figures(trainer, folder, session)
    observers = _observers(config, session, folder, status, figures, log) if first else BaseObserver()
    info = _info(config, session, backend, data, plan, trainer, folder)
    saver = BackgroundSaver(checkpoints, session.control, lambda state: _note_left_out(state, data))
    place = (plan.total_steps, session.environment)
    session.link.on_interrupt = lambda: interrupted(folder, trainer.state.scalars.step, *place)
    try:
        if first:
            loss = model_family(config.model).loss()
            description = describe_run(config.data, source.splits, trainer.model, loss)
            write_start(folder, config, description, start or Path.cwd())
            begun.remember()
        if stretched is not None:
            observers.on_message(stretched)
        ranks = session.control.size
        with session.link.stoppable(info.start_step, grace=kept.grace_seconds, ranks=ranks) as stopping:
            result = trainer.train(
                data,
                plan,
                validation=source.validation,
                observers=observers,
                info=info,
                save=saver,
                stopping=stopping,
                commits=commits,
            )
        summary = summary_of_run(config, session, backend, trainer, result, resumed_from=info.start_step)
        summary |= _left_out(source, observers, folder)
        summary |= {} if commits is None else {"worlds": [asdict(world) for world in commits.worlds]}
        if first:
            write_end(folder, config, trainer, summary, begun)
        observers.on_end(summary)
    except Stopped:
        status.ended("stopped")
        raise
    except BaseException as error:
        if commits is None:
            status.ended("failed", cause_of(error, session.control.failures()))
        raise
    finally:
        saver.close()
        observers.close()
    return summary


def _resume(trainer: Trainer, newest: Path, identity: Identity, config: Config, path: Path) -> str | None:
    """Restore a checkpoint, if its run had the same samples; return, on rank 0, a warning of the schedule."""
    first = trainer.backend.primary
    earlier = opened(path, "--resume")[1] if first else None
    if earlier is not None:
        # Before the tensors are looked at: other data may make another model.
        check_samples(scalars_of(newest).get("data"), identity, config, earlier, path)
    trainer.restore(newest)
    return stretched_schedule(config, earlier) if earlier is not None else None


def _left_out(source: RunData, observers: Observer, folder: RunFolder) -> dict[str, Any]:
    """Say how many samples were left out, and which; every rank calls it."""
    data = source.training
    if not isinstance(data, SourceTraining) or not data.bad.tolerated:
        return {}
    data.bad.share()
    told = left_out_line(source.bad, folder.summary.name)
    if told:
        observers.on_message(told)
    return _bad_records(source)


def _bad_records(source: RunData) -> dict[str, Any]:
    return {"bad_records": len(source.bad), "left_out": source.bad}


def left_out_line(bad: Sequence[str], file: str) -> str:
    """Return a warning that names the first of the samples that were left out; "" if there are none.

    Args:
        bad: what is wrong with each.
        file: the file in the run's folder that names them all.
    """
    if not bad:
        return ""
    others = f" ({file} names all {len(bad)})" if len(bad) > 1 else ""
    return f"warning: {plural(len(bad), 'sample')} could not be read and did not count: {bad[0]}{others}"


def _plan(config: Config, steps_per_epoch: int) -> Plan:
    total = config.training.epochs * steps_per_epoch
    total = min(total, config.training.max_steps or total)
    checkpoint = config.checkpoint
    commit_every = config.elastic.commit_every if config.elastic.elastic else None
    return Plan(total, config.observability.log_every, checkpoint.checkpoint_every, commit_every, checkpoint.best)


def run_trainer(config: Config, source: RunData, backend: Backend) -> Trainer:
    """Return the trainer of what `config` names, for its data.

    Raises:
        ConfigError: options that do not fit.
        DataError: data that do not fit the model.
    """
    return checked_trainer(config, source.splits, backend, _schedule_steps(config, source))


def checked_trainer(config: Config, splits: DataSplits, backend: Backend, steps: int) -> Trainer:
    """Do what `run_trainer` does, for a schedule of the learning rate that spans `steps`."""
    if config.model.sequence_parallel and "tp" not in backend.axes:
        raise ConfigError("--sequence-parallel has no effect without --parallel tp=N: leave it out.")
    trainer = trainer_for(config, splits.sample_shape, splits.classes, backend, steps)
    check_shapes(trainer.model, splits, model_family(config.model).loss())
    return trainer


def trainer_for(config: Config, shape: Any, classes: int | None, backend: Backend, steps: int) -> Trainer:
    """Return the trainer of what `config` names, for any data of that shape.

    Args:
        config: of the run.
        shape: shape of one input, or a nest of shapes.
        classes: number of classes; None if the targets are no labels.
        backend: the replicas.
        steps: what the schedule of the learning rate spans.

    Raises:
        ConfigError: options that do not fit.
    """
    family = model_family(config.model)
    seed, loss = config.training.seed, family.loss()
    metrics = "weighted_metrics" if config.data.tolerated else "metrics"  # what is left out weighs nothing
    return Trainer(
        _split(lambda: build_model(config.model, shape, classes, seed), config, classes, backend),
        lambda: build_optimizer(config.optim, steps, config.data.batch),
        soft_label_loss(config.data, loss),
        seed=seed,
        backend=backend,
        **{metrics: soft_label_metrics(config.data, family.metrics())},
        **_step_options(config),
    )


def _split(build: Callable[[], Any], config: Config, classes: int | None, backend: Backend) -> Callable[[], Any]:
    """Return a builder of the model that `build` builds, split where the ranks are laid out along tp or cp.

    Raises:
        ConfigError: a model without rules for tp.
    """
    if not {"tp", "cp"} & set(backend.axes):
        return build
    rules = layout_rules(config.model, classes, backend.axes.get("tp", 1))
    return lambda: parallelize(build, rules, sequence_parallel=config.model.sequence_parallel)


def _schedule_steps(config: Config, source: RunData) -> int:
    """Return the steps of all epochs: the schedule spans them also where --max-steps ends the run before."""
    return config.training.epochs * source.training.steps_per_epoch


def _step_options(config: Config) -> dict[str, Any]:
    names = {field.name for field in fields(StepOptions)}
    sections = (
        *(config.training, config.optim, config.exchange, config.update),
        *(config.pipeline, config.bad_steps, config.desync),
    )
    return {name: value for part in sections for name, value in vars(part).items() if name in names}


def _observers(
    config: Config,
    session: Session,
    folder: RunFolder,
    status: StatusWriter,
    figures: Callable[[], dict[str, float]],
    log: TextIO | None,
) -> Observers:
    chosen: list[Observer] = [make_console(live=on_terminal(session.environment), log=log)]
    chosen += [JsonlWriter(folder.metrics), status]
    if log is not None:
        chosen.append(make_console(log, live=False))
    reported = config.observability
    if reported.metrics_port is not None:
        chosen.append(open_exporter(reported.metrics_port, reported.metrics_host, figures, again=session.rejoined))
    if config.observability.tensorboard:
        chosen.append(TensorBoardWriter(folder.tensorboard))
    return Observers(chosen)


def _info(
    config: Config,
    session: Session,
    backend: Backend,
    data: TrainingData,
    plan: Plan,
    trainer: Trainer,
    folder: RunFolder,
) -> RunInfo:
    return RunInfo(
        recipe=_described(config),
        **who_trains(backend),
        launcher=session.environment.launcher,
        global_batch=data.batch,
        per_replica_batch=data.batch // backend.data_parallel.size,
        total_steps=plan.total_steps,
        steps_per_epoch=data.steps_per_epoch,
        parameters=trainer.state.parameters(),
        start_step=trainer.state.scalars.step,
        accumulate=config.training.accumulate,
        learning_rate=describe_rate(config.optim, data.batch, config.training.epochs * data.steps_per_epoch),
        run_dir=folder.path,
        options=trainer.options.chosen(),
        threads=session.plan.threads,
        wording=on_command_line,
    )


def _described(config: Config) -> str:
    """Return the recipe's name, and the user's own code where it takes the place of the recipe's."""
    own = {"model": config.model.model, "data": config.data.data}
    words = [f"{name} {value}" for name, value in own.items() if is_user_code(value)]
    return ", ".join([config.recipe, *words])


def _refuse_finished(trainer: Trainer, plan: Plan) -> None:
    done = trainer.state.scalars.step
    if done >= plan.total_steps:
        raise ConfigError(
            f"The run has finished {done} steps and is to end at {plan.total_steps}: there is nothing left to train. "
            "--epochs or --max-steps extend it."
        )


def _check_profile(config: Config, trainer: Trainer, plan: Plan) -> None:
    """Refuse steps that this run does not take.

    Raises:
        ConfigError: naming them.
    """
    reported, done = config.observability, trainer.state.scalars.step
    trace = trace_config(reported.timeline, reported.profile, reported.profile_ranks)
    if (
        trace is not None
        and trace.steps is not None
        and not done < trace.steps[0] <= trace.steps[1] <= plan.total_steps
    ):
        raise ConfigError(
            f"--profile={reported.profile} names steps that this run does not take: it goes from step {done + 1} to "
            f"{plan.total_steps}. Name some of these."
        )


def _note_left_out(state: Any, data: TrainingData) -> None:
    state.scalars.left_out = {str(number): text for number, text in left_out(data).items()}
