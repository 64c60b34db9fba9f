"""Files, summary and observers of a run."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import split_axes, world_size
from hvdtrain.checkpoint.lock import FolderLock
from hvdtrain.checkpoint.naming import complete, step_of
from hvdtrain.config.errors import CheckpointError, on_command_line
from hvdtrain.config.files import to_yaml
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.export.adapters import save_lora
from hvdtrain.layers.convert import without_sync_batch_norm
from hvdtrain.observability.console import make_console
from hvdtrain.observability.events import Observer, Observers, RunInfo
from hvdtrain.observability.jsonl import JsonlWriter
from hvdtrain.observability.mlflow_tracker import MlflowTracker
from hvdtrain.observability.plots import draw_curves
from hvdtrain.observability.prometheus import open_exporter
from hvdtrain.observability.summary import draft_of, write_json
from hvdtrain.observability.tensorboard import TensorBoardWriter
from hvdtrain.observability.wandb_tracker import WandbTracker
from hvdtrain.observability.wording import plural
from hvdtrain.optim.schedules import describe_rate, scaled_learning_rate
from hvdtrain.recipes import run_name
from hvdtrain.runs.description import RunDescription, write_description
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.tuning import student_of, tuned_model
from hvdtrain.runtime.consequences import reason
from hvdtrain.runtime.logs import LOGGER, on_terminal
from hvdtrain.runtime.report import collect_environment
from hvdtrain.runtime.session import Session
from hvdtrain.state.named_tensors import is_split
from hvdtrain.training.callbacks.report import FitResult, summary_of
from hvdtrain.training.plan import Plan
from hvdtrain.training.run_info import run_info
from hvdtrain.training.trainer import Trainer

SCATTERS_EACH_MICROBATCH = 2
"""From this stage of ZeRO on gradients are not accumulated whole."""


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


def exchanged_bytes(trainer: Trainer) -> float:
    """Return the bytes of dense gradients that a rank gives to the exchange in a step; of local steps, of weights."""
    options = trainer.options
    narrow = options.compression in ("bf16", "fp16")
    sizes = (
        math.prod(variable.shape) * (2 if narrow else tf.as_dtype(variable.dtype).size)
        for variable in trainer.model.trainable_variables
    )
    rounds = options.accumulate if options.zero >= SCATTERS_EACH_MICROBATCH else 1
    return sum(sizes) * rounds / max(1, options.local_steps or 1)


def observers_of(
    config: Config, session: Session, folder: RunFolder, figures: Callable[[], dict[str, float]]
) -> Observers:
    """Return the observers of a run on rank 0: console, files, HTTP."""
    chosen: list[Observer] = [make_console(live=on_terminal(session.environment)), JsonlWriter(folder.metrics)]
    reported = config.observability
    if reported.metrics_port is not None:
        chosen.append(open_exporter(reported.metrics_port, reported.metrics_host, figures, again=session.link.rejoined))
    if reported.tensorboard and has_package("tensorboard", "TensorBoard files", "tensorboard"):
        chosen.append(TensorBoardWriter(folder.tensorboard))
    return Observers(chosen)


def callbacks_of(config: Config) -> list[keras.callbacks.Callback]:
    """Return the Keras callbacks of a run. Raises ConfigError for a tracker whose package is not installed."""
    chosen: list[keras.callbacks.Callback] = []
    if config.optim.ema:
        chosen.append(keras.callbacks.SwapEMAWeights(swap_on_epoch=True))
    tracker = {"none": None, "wandb": WandbTracker, "mlflow": MlflowTracker}[config.observability.tracker]
    if tracker is not None:
        chosen.append(tracker(asdict(config)))
    return chosen


def info_of(config: Config, data: TrainingData, plan: Plan, trainer: Trainer, folder: RunFolder) -> RunInfo:
    """Return the facts about the run for its observers."""
    own = {"model": config.model.model, "data": config.data.data}
    words = [f"{name} {value}" for name, value in own.items() if is_user_code(value)]
    words = words if len(words) == len(own) else [run_name(config), *words]
    return replace(
        run_info(trainer.backend, state=trainer.state, options=trainer.options, data=data, plan=plan),
        recipe=", ".join(words),
        begin_epoch=0,
        begin_step=0,
        learning_rate=describe_rate(config.optim, data.batch, config.training.epochs * data.steps_per_epoch),
        run_dir=folder.path,
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


class StartFiles:
    """Files that a run's checkpoints need: `config.yaml`, `env.json` and the description."""

    def __init__(self, folder: RunFolder, lock: FolderLock) -> None:
        self._folder = folder
        self._lock = lock
        self._contents: dict[Path, bytes] = {}

    def remember(self) -> None:
        """Keep in memory what the files hold, once they are written."""
        folder = self._folder
        files = (folder.config, folder.environment, folder.preprocessing, folder.tokenizer)
        self._contents = {file: file.read_bytes() for file in files if file.is_file()}

    def restore(self) -> None:
        """Write those again that are missing, and warn of it; called where the folder is about to be written.

        Raises:
            CheckpointError: another job writes to the folder by now.
            OSError: it cannot be written.
        """
        self._lock.renew()
        missing = [file for file in self._contents if not file.exists()]
        for file in missing:
            file.write_bytes(self._contents[file])
        if missing:
            names = ", ".join(file.name for file in missing)
            LOGGER.warning(
                f"{names} of the run folder {self._folder.path} were removed while the run trains. "
                "They are written again; checkpoints from before are not."
            )


def write_start(folder: RunFolder, config: Config, description: RunDescription, start: Path) -> None:
    """Write the configuration, the environment and the description of the model, before the first step.

    `start` is the folder in which relative paths of the configuration begin.
    """
    folder.config.write_text(to_yaml(config), encoding="utf-8")
    write_json(folder.environment, {"folder": str(start), **collect_environment()})
    write_description(folder, description)


def write_end(folder: RunFolder, config: Config, trainer: Trainer, summary: dict[str, Any], begun: StartFiles) -> None:
    """Write the trained model, the curves and the summary.

    Raises:
        CheckpointError: they cannot be written.
    """
    try:
        begun.restore()
        _write_end(folder, config, trainer, summary)
    except OSError as error:
        why = reason(error).rstrip(".")
        raise CheckpointError(
            f"The model and the summary cannot be written to {folder.path}: {why}. The training is complete and saved: "
            f"`python -m hvdtrain checkpoint export {folder.path}` writes the model."
        ) from error


def _write_end(folder: RunFolder, config: Config, trainer: Trainer, summary: dict[str, Any]) -> None:
    if is_split(trainer.model):
        folder.model.unlink(missing_ok=True)  # of fewer steps, before the run went on in this layout
        LOGGER.info(
            f"each rank holds a part of the model, so that {folder.path} has no {folder.model.name}. "
            f"`python -m hvdtrain checkpoint export {folder.path}` writes the whole model."
        )
    else:
        with trainer.averaged_weights(), draft_of(folder.model) as draft:
            if config.tuning.lora is not None:
                save_lora(student_of(trainer.model), folder.adapters)
            # The model loads without this package: layers are converted back, and schedules of the rate left out.
            model = tuned_model(trainer.model)
            model = without_sync_batch_norm(model) if config.training.sync_batch_norm else model
            compiled, model.compiled = model.compiled, False
            model.save(draft)
            model.compiled = compiled
    if config.observability.plots and has_package("matplotlib", "curves.png", "plots") and folder.metrics.exists():
        draw_curves(folder.metrics, folder.curves, title=_title(summary), staleness=summary.get("staleness"))
    write_json(folder.summary, summary)


def summary_of_run(
    config: Config, session: Session, trainer: Trainer, result: FitResult, *, resumed_from: int
) -> dict[str, Any]:
    """Return the contents of `summary.json`, the same on every rank; `resumed_from` is a step, or 0.

    Raises:
        LaunchError: the ranks' parameters differ.
    """
    state, backend = trainer.state, trainer.backend
    return {
        "recipe": run_name(config),
        "backend": backend.name,
        "world_size": world_size(backend),
        **({"roles": dict(backend.roles)} if backend.roles else {}),
        **({"mesh": axes} if (axes := split_axes(backend)) else {}),
        "launcher": session.environment.launcher,
        "controller": session.environment.controller,
        "global_batch": config.data.batch,
        "per_replica_batch": config.data.batch // backend.data_parallel.size,
        "model": config.model.model,
        "data": config.data.data,
        "optimizer": config.optim.optimizer,
        "options": trainer.options.chosen(),
        "accumulate": config.training.accumulate,
        "precision": config.training.precision,
        "peak_learning_rate": scaled_learning_rate(config.optim, config.data.batch),
        "resumed_from": resumed_from,
        **summary_of(result),
        **({"best": state.scalars.best} if state.scalars.best else {}),
        "parameters": state.parameters(),
        "parameter_hash": state.agreed_hash(backend),
    }


def _title(summary: dict[str, Any]) -> str:
    size = summary["world_size"]
    # Without a launcher there is one process, which may hold several replicas.
    word = "replica" if summary["launcher"] == "none" and size > 1 else "rank"
    mesh = " x ".join(f"{axis} {ranks}" for axis, ranks in summary.get("mesh", {}).items())
    return f"{summary['recipe']}, {plural(size, word)}" + (f" on a mesh of {mesh}" if mesh else "")
