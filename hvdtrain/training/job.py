"""A run from its configuration: what `train` and `evaluate` do on every rank."""

import os
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import to_yaml
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.pipeline import SourceTraining
from hvdtrain.data.shapes import check_shapes
from hvdtrain.layers.convert import without_sync_batch_norm
from hvdtrain.models.registry import build_model, model_family
from hvdtrain.observability.console import make_console
from hvdtrain.observability.events import BaseObserver, Observer, Observers, RunInfo
from hvdtrain.observability.jsonl import JsonlWriter
from hvdtrain.observability.plots import draw_curves
from hvdtrain.observability.summary import write_json
from hvdtrain.observability.tensorboard import TensorBoardWriter
from hvdtrain.observability.wording import plural
from hvdtrain.optim.averaging import averaged_weights
from hvdtrain.optim.optimizers import build_optimizer
from hvdtrain.optim.scaling import describe_rate, scaled_learning_rate
from hvdtrain.runtime.report import collect_environment
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.terminal import on_terminal
from hvdtrain.training.blending import blended_loss, blended_metrics
from hvdtrain.training.folder import RunFolder, create, opened
from hvdtrain.training.loop import Plan
from hvdtrain.training.options import StepOptions
from hvdtrain.training.result import FitResult, summary_of
from hvdtrain.training.run_data import RunData, run_data
from hvdtrain.training.trainer import Trainer


def train(session: Session, config: Config, path: Path, *, resume: bool = False) -> dict[str, Any]:
    """Train as `config` says, write the run's folder, and return its summary (the same on every rank).

    Args:
        session: this rank's part in the job.
        config: the whole configuration, the same on every rank.
        path: the run's folder; rank 0 makes it once everything else is there, and writes into it.
        resume: go on from the newest checkpoint in it.

    Raises:
        UserError: options, data or a checkpoint that cannot be used.
    """
    backend = backend_for(session)
    source = run_data(config, backend)
    data = source.training
    plan = _plan(config, data.steps_per_epoch)
    trainer = run_trainer(config, source, backend)
    trainer.build(data)
    folder, first = RunFolder(path), backend.index == 0
    checkpoints = Checkpointer(folder.checkpoints, config.checkpoint.keep)
    if first and resume:
        trainer.restore(checkpoints.newest())
    elif first:
        create(path)
    trainer.broadcast_state()
    _refuse_finished(trainer, plan)
    observers = _observers(config, session, folder) if first else BaseObserver()
    info = _info(config, session, backend, data, plan, trainer, folder)
    stretched = stretched_schedule(config, opened(path, "--resume")[1]) if first and resume else None
    try:
        if first:
            _write_start(folder, config)
        if stretched is not None:
            observers.on_message(stretched)
        result = trainer.train(
            data,
            plan,
            validation=source.validation,
            observers=observers,
            info=info,
            save=lambda state: _save(checkpoints, state),
        )
        summary = _summary(config, session, backend, trainer, result, resumed_from=info.start_step)
        summary |= _left_out(source, observers)
        if first:
            _write_end(folder, config, trainer, summary)
        observers.on_end(summary)
    finally:
        observers.close()
    return summary


def evaluate(session: Session, config: Config, folder: RunFolder) -> dict[str, Any]:
    """Evaluate the newest checkpoint in `folder` on its recipe's validation data, distributed over all ranks.

    Raises:
        CheckpointError: there is no checkpoint, or it does not fit the configuration.
    """
    backend = backend_for(session)
    source = run_data(config, backend)
    trainer = run_trainer(config, source, backend)
    trainer.build_on(next(iter(source.validation)))
    if backend.index == 0:
        trainer.restore(Checkpointer(folder.checkpoints).newest())
    trainer.broadcast_state()
    outcome = trainer.evaluate_on(source.validation)
    figures = {
        "recipe": config.recipe,
        "step": trainer.state.scalars.step,
        "world_size": backend.size,
        "val_loss": outcome.loss,
        **{f"val_{name}": value for name, value in outcome.metrics.items()},
        "parameter_hash": trainer.state.agreed_hash(backend),
    }
    if backend.index == 0:
        write_json(folder.evaluation, figures)
    return figures


def _left_out(source: RunData, observers: Observer) -> dict[str, Any]:
    """Say how many samples were left out, and which is one of them; every rank calls it."""
    if not source.training.bad.tolerated:
        return {}
    source.training.bad.share()
    bad = source.bad
    if bad:
        observers.on_message(f"warning: {plural(len(bad), 'sample')} could not be read and did not count: {bad[0]}")
    return {"bad_records": len(bad)}


def _plan(config: Config, steps_per_epoch: int) -> Plan:
    total = config.training.epochs * steps_per_epoch
    total = min(total, config.training.max_steps or total)
    return Plan(total, config.observability.log_every, config.checkpoint.checkpoint_every)


def run_trainer(config: Config, source: RunData, backend: Backend) -> Trainer:
    """Return the trainer of what `config` names, for its data.

    Raises:
        ConfigError: options that do not fit.
        DataError: data that do not fit the model.
    """
    family, splits = model_family(config.model), source.splits
    seed, loss = config.training.seed, family.loss()
    metrics = "weighted_metrics" if config.data.tolerated else "metrics"  # what is left out weighs nothing
    trainer = Trainer(
        lambda: build_model(config.model, splits.sample_shape, splits.classes, seed),
        lambda: build_optimizer(config.optim, _schedule_steps(config, source), config.data.batch),
        blended_loss(config.data, loss),
        seed=seed,
        backend=backend,
        **{metrics: blended_metrics(config.data, family.metrics())},
        **_step_options(config),
    )
    check_shapes(trainer.model, splits, loss)
    return trainer


def _schedule_steps(config: Config, source: RunData) -> int:
    """Return the steps of all epochs: the schedule spans them also where --max-steps ends the run before."""
    return config.training.epochs * source.training.steps_per_epoch


def _step_options(config: Config) -> dict[str, Any]:
    training = asdict(config.training)
    names = {field.name for field in fields(StepOptions)}
    options = {name: value for name, value in training.items() if name in names}
    return {
        **options,
        **asdict(config.exchange),
        "clip_norm": config.optim.clip_norm,
        "clip_value": config.optim.clip_value,
    }


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
    data: SourceTraining,
    plan: Plan,
    trainer: Trainer,
    folder: RunFolder,
) -> RunInfo:
    return RunInfo(
        recipe=_described(config),
        backend=backend.name,
        world_size=backend.size,
        launcher=session.environment.launcher,
        controller=backend.carrier,
        processes=backend.processes,
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


def stretched_schedule(config: Config, earlier: Config) -> str | None:
    """Return what to say of a resumed run whose learning rate leaves the course that it was on; None if it does not."""
    epochs, before = config.training.epochs, earlier.training.epochs
    if config.optim.schedule == "constant" or epochs == before:
        return None
    return (
        f"warning: the {config.optim.schedule} schedule spans {plural(epochs, 'epoch')} now and spanned {before} "
        "before: the learning rate goes on where the longer or shorter course is at this step."
    )


def _save(checkpoints: Checkpointer, state: Any) -> None:
    checkpoints.save(state.scalars.step, state.variables(), asdict(state.scalars))


def _write_start(folder: RunFolder, config: Config) -> None:
    folder.config.write_text(to_yaml(config), encoding="utf-8")
    write_json(folder.environment, collect_environment())


def _write_end(folder: RunFolder, config: Config, trainer: Trainer, summary: dict[str, Any]) -> None:
    # Keras chooses the format by the suffix; the draft keeps it, and the name appears with a whole file only.
    draft = folder.path / f".{folder.model.name}.{os.getpid()}.keras"
    with averaged_weights(trainer.optimizer, trainer.model):
        # Synchronized layers that were put in are taken out, so that the model loads without this package.
        model = without_sync_batch_norm(trainer.model) if config.training.sync_batch_norm else trainer.model
        model.save(draft)
    os.replace(draft, folder.model)
    if config.observability.plots:
        draw_curves(folder.metrics, folder.curves, title=_title(summary))
    write_json(folder.summary, summary)


def _title(summary: dict[str, Any]) -> str:
    size = summary["world_size"]
    # Without a launcher there is one process, which may hold several replicas.
    word = "replica" if summary["launcher"] == "none" and size > 1 else "rank"
    return f"{summary['recipe']}, {plural(size, word)}"


def _summary(
    config: Config, session: Session, backend: Backend, trainer: Trainer, result: FitResult, *, resumed_from: int
) -> dict[str, Any]:
    state = trainer.state
    return {
        "recipe": config.recipe,
        "backend": backend.name,
        "world_size": backend.size,
        "launcher": session.environment.launcher,
        "controller": session.environment.controller,
        "global_batch": config.data.batch,
        "per_replica_batch": config.data.batch // backend.size,
        "model": config.model.model,
        "data": config.data.data,
        "optimizer": config.optim.optimizer,
        "options": trainer.options.chosen(),
        "accumulate": config.training.accumulate,
        "precision": config.training.precision,
        "peak_learning_rate": scaled_learning_rate(config.optim, config.data.batch),
        "resumed_from": resumed_from,
        **summary_of(result),
        "parameters": state.parameters(),
        "parameter_hash": state.agreed_hash(backend),
    }
