"""Observers of a run, and the figures they report."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.checkpoint.naming import complete, step_of
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


def run_figures(trainer: Trainer, folder: RunFolder, session: Session) -> Callable[[], dict[str, float]]:
    """Return a function that looks at a run, from any thread, and returns its figures by name."""
    per_step, ranks = exchanged_bytes(trainer), trainer.backend.size

    def figures() -> dict[str, float]:
        scalars = trainer.state.scalars
        bad, saved = scalars.bad_steps, complete(folder.checkpoints)
        found: dict[str, float] = {
            "bad_steps": bad.non_finite + bad.spikes,
            "rollbacks": len(bad.rollbacks),
            "checkpoints": len(saved),
            "exchange_bytes": scalars.step * per_step if ranks > 1 else 0,
        }
        if saved:
            found["checkpoint_step"] = step_of(saved[-1])
        slow = session.link.stragglers.latest if session.link.stragglers is not None else None
        if slow is not None:
            found |= {"slowest_rank": slow.rank, "slowest_rank_own_seconds": slow.own_ms / 1000.0}
        return found

    return figures


SCATTERS_EACH_MICROBATCH = 2
"""From this stage of ZeRO on gradients are not accumulated whole."""


def exchanged_bytes(trainer: Trainer) -> float:
    """Return the bytes of dense gradients that a rank gives to the exchange in a step; of local steps, of weights."""
    options = trainer.options
    sizes = (_bytes(variable, options.compression) for variable in trainer.model.trainable_variables)
    rounds = options.accumulate if options.zero >= SCATTERS_EACH_MICROBATCH else 1
    return sum(sizes) * rounds / max(1, options.local_steps or 1)


def _bytes(variable: Any, compression: str | None) -> int:
    size = 1
    for each in variable.shape:
        size *= int(each)
    width = 2 if compression in ("bf16", "fp16") or "16" in str(variable.dtype) else _WIDTHS.get(str(variable.dtype), 4)
    return size * width


_WIDTHS = {"float64": 8, "float32": 4}


def observers_of(
    config: Config,
    session: Session,
    folder: RunFolder,
    figures: Callable[[], dict[str, float]],
) -> Observers:
    """Return the observers of a run on rank 0: console, files, HTTP."""
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
    """Return the facts about the run for its observers."""
    own = {"model": config.model.model, "data": config.data.data}
    words = [f"{name} {value}" for name, value in own.items() if is_user_code(value)]
    return RunInfo(
        recipe=", ".join([config.recipe, *words]),
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
