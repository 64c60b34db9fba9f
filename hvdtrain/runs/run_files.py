"""Write a run's files: configuration, summary, curves, and the trained model."""

from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend, split_axes, world_size
from hvdtrain.checkpoint.lock import FolderLock
from hvdtrain.config.errors import CheckpointError
from hvdtrain.config.files import to_yaml
from hvdtrain.config.run import Config
from hvdtrain.layers.convert import without_sync_batch_norm
from hvdtrain.observability.plots import draw_curves
from hvdtrain.observability.summary import draft_of, write_json
from hvdtrain.observability.wording import plural
from hvdtrain.optim.schedules import scaled_learning_rate
from hvdtrain.runs.description import RunDescription, write_description
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.reporting import has_package
from hvdtrain.runtime.consequences import reason
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.report import collect_environment
from hvdtrain.runtime.session import Session
from hvdtrain.state.named_tensors import is_split
from hvdtrain.training.loop.report import FitResult, summary_of
from hvdtrain.training.trainer import Trainer


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
        _save_model(folder, config, trainer)
    if config.observability.plots and has_package("matplotlib", "curves.png", "plots") and folder.metrics.exists():
        draw_curves(folder.metrics, folder.curves, title=_title(summary))
    write_json(folder.summary, summary)


def _save_model(folder: RunFolder, config: Config, trainer: Trainer) -> None:
    with trainer.averaged_weights(), draft_of(folder.model) as draft:
        # Converted layers are converted back, so that the model loads without this package.
        model = without_sync_batch_norm(trainer.model) if config.training.sync_batch_norm else trainer.model
        model.save(draft)


def summary_of_run(
    config: Config, session: Session, backend: Backend, trainer: Trainer, result: FitResult, *, resumed_from: int
) -> dict[str, Any]:
    """Return the contents of `summary.json`, the same on every rank; `resumed_from` is a step, or 0.

    Raises:
        LaunchError: the ranks' parameters differ.
    """
    state = trainer.state
    return {
        "recipe": config.recipe,
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
