"""A run from its configuration: what `train` does on every rank."""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.manifest import scalars_of
from hvdtrain.config.errors import ConfigError, on_command_line
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.identity import Identity, identity_of
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.data.shapes import check_shapes
from hvdtrain.models.registry import build_model, model_family
from hvdtrain.observability.console import make_console
from hvdtrain.observability.events import BaseObserver, Observer, Observers, RunInfo
from hvdtrain.observability.jsonl import JsonlWriter
from hvdtrain.observability.tensorboard import TensorBoardWriter
from hvdtrain.observability.wording import plural
from hvdtrain.optim.optimizers import build_optimizer
from hvdtrain.optim.scaling import describe_rate
from hvdtrain.runs.describe import describe_run
from hvdtrain.runs.folder import RunFolder, create, opened
from hvdtrain.runs.interrupted import interrupted
from hvdtrain.runs.resume import check_samples, settle_processes, stretched_schedule
from hvdtrain.runs.run_data import RunData, left_out, run_data
from hvdtrain.runs.run_files import summary_of_run, write_end, write_start
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.terminal import on_terminal
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.objective.soft_labels import soft_label_loss, soft_label_metrics
from hvdtrain.training.options import StepOptions
from hvdtrain.training.run_info import who_trains
from hvdtrain.training.trainer import Trainer


def train(
    session: Session, config: Config, path: Path, *, resume: bool = False, start: Path | None = None
) -> dict[str, Any]:
    """Train as `config` says, write the run's folder, and return its summary (the same on every rank).

    Args:
        session: this rank's part in the job.
        config: the whole configuration, the same on every rank.
        path: the run's folder; rank 0 makes it once everything else is there, and writes into it.
        resume: go on from the newest checkpoint in it.
        start: the folder in which relative paths of `config` begin; None: the working folder.

    Raises:
        UserError: options, data or a checkpoint that cannot be used.
    """
    backend = backend_for(session)
    source = run_data(config, backend)
    data = source.training
    plan = _plan(config, data.steps_per_epoch)
    trainer = run_trainer(config, source, backend)
    trainer.build(data)
    folder, first = RunFolder(path), backend.primary
    checkpoints = Checkpointer(folder.checkpoints, config.checkpoint.keep, backend)
    identity, stretched = identity_of(source.loaded), None
    if resume:
        stretched = _resume(trainer, checkpoints, identity, config, path)
    elif first:
        create(path)
    trainer.state.scalars.data = identity
    trainer.broadcast_state()
    settle_processes(trainer.state.scalars, data, backend.processes, path)
    if isinstance(data, SourceTraining):
        data.bad.recall(trainer.state.scalars.left_out)
    _refuse_finished(trainer, plan)
    observers = _observers(config, session, folder) if first else BaseObserver()
    info = _info(config, session, backend, data, plan, trainer, folder)
    place = (plan.total_steps, session.environment)
    session.link.on_interrupt = lambda: interrupted(folder, trainer.state.scalars.step, *place)
    try:
        if first:
            loss = model_family(config.model).loss()
            description = describe_run(config.data, source.splits, trainer.model, loss)
            write_start(folder, config, description, start or Path.cwd())
        if stretched is not None:
            observers.on_message(stretched)
        result = trainer.train(
            data,
            plan,
            validation=source.validation,
            observers=observers,
            info=info,
            save=lambda state: _save(checkpoints, state, data),
        )
        summary = summary_of_run(config, session, backend, trainer, result, resumed_from=info.start_step)
        summary |= _left_out(source, observers, folder)
        if first:
            write_end(folder, config, trainer, summary)
        observers.on_end(summary)
    finally:
        observers.close()
    return summary


def _resume(trainer: Trainer, checkpoints: Checkpointer, identity: Identity, config: Config, path: Path) -> str | None:
    """Restore the newest checkpoint, if its run had the same samples; return, on rank 0, a warning of the schedule."""
    first = trainer.backend.primary
    earlier = opened(path, "--resume")[1] if first else None
    newest = checkpoints.find()
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
    return Plan(total, config.observability.log_every, checkpoint.checkpoint_every, checkpoint.best)


def run_trainer(config: Config, source: RunData, backend: Backend) -> Trainer:
    """Return the trainer of what `config` names, for its data.

    Raises:
        ConfigError: options that do not fit.
        DataError: data that do not fit the model.
    """
    splits = source.splits
    trainer = trainer_for(config, splits.sample_shape, splits.classes, backend, _schedule_steps(config, source))
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
        lambda: build_model(config.model, shape, classes, seed),
        lambda: build_optimizer(config.optim, steps, config.data.batch),
        soft_label_loss(config.data, loss),
        seed=seed,
        backend=backend,
        **{metrics: soft_label_metrics(config.data, family.metrics())},
        **_step_options(config),
    )


def _schedule_steps(config: Config, source: RunData) -> int:
    """Return the steps of all epochs: the schedule spans them also where --max-steps ends the run before."""
    return config.training.epochs * source.training.steps_per_epoch


def _step_options(config: Config) -> dict[str, Any]:
    names = {field.name for field in fields(StepOptions)}
    sections = (config.training, config.optim, config.exchange, config.update)
    return {name: value for part in sections for name, value in vars(part).items() if name in names}


def _observers(config: Config, session: Session, folder: RunFolder) -> Observers:
    console = make_console(live=on_terminal(session.environment))
    chosen: list[Observer] = [console, JsonlWriter(folder.metrics)]
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
        per_replica_batch=data.batch // backend.size,
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


def _save(checkpoints: Checkpointer, state: Any, data: TrainingData) -> None:
    state.scalars.left_out = {str(number): text for number, text in left_out(data).items()}
    checkpoints.save_state(state)
