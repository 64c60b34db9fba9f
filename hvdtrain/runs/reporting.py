"""Who is told of a run, and what."""

import importlib.util
from collections.abc import Callable, Sequence

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import on_command_line
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.console import make_console
from hvdtrain.observability.events import Observer, Observers, RunInfo
from hvdtrain.observability.jsonl import JsonlWriter
from hvdtrain.observability.prometheus import open_exporter
from hvdtrain.observability.tensorboard import TensorBoardWriter
from hvdtrain.observability.wording import plural
from hvdtrain.optim.schedules import describe_rate
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runtime.logs import LOGGER, on_terminal
from hvdtrain.runtime.session import Session
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.run_info import who_trains
from hvdtrain.training.trainer import Trainer


def observers_of(
    config: Config,
    session: Session,
    folder: RunFolder,
    figures: Callable[[], dict[str, float]],
) -> Observers:
    """Return what rank 0 tells of a run: on the console, in its files, and over HTTP."""
    chosen: list[Observer] = [make_console(live=on_terminal(session.environment)), JsonlWriter(folder.metrics)]
    reported = config.observability
    if reported.metrics_port is not None:
        chosen.append(open_exporter(reported.metrics_port, reported.metrics_host, figures, again=session.rejoined))
    if reported.tensorboard and has_package("tensorboard", "TensorBoard files", "tensorboard"):
        chosen.append(TensorBoardWriter(folder.tensorboard))
    return Observers(chosen)


def info_of(
    config: Config,
    session: Session,
    backend: Backend,
    data: TrainingData,
    plan: Plan,
    trainer: Trainer,
    folder: RunFolder,
) -> RunInfo:
    """Return what the observers are told at the start."""
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


def has_package(package: str, what: str, extra: str) -> bool:
    """Return whether an optional package is installed; if not, log how to install it."""
    if importlib.util.find_spec(package) is not None:
        return True
    LOGGER.info(f"no {what}: pip install 'hvdtrain[{extra}]' (--{extra} False leaves out this line)")
    return False


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
