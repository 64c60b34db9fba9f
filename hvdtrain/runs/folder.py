"""The folder of a run: its files, creation and reopening."""

import time
from pathlib import Path

from hvdtrain.checkpoint import lock
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.config.files import FilesRead, apply_values, read_values
from hvdtrain.config.run import Config

RUNS = Path("runs")


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        """The configuration as it was declared; `--config` on it reproduces the run."""
        self.environment = path / "env.json"
        """Versions, machine and settings."""
        self.metrics = path / "metrics.jsonl"
        """One JSON object for each logged step and evaluation."""
        self.logs = path / "logs"
        """Each rank's log."""
        self.summary = path / "summary.json"
        """The results of the run."""
        self.preprocessing = path / "preprocessing.json"
        """How data are prepared for the model, and the kind of its outputs."""
        self.tokenizer = path / "tokenizer.model"
        """The sentencepiece model of a text's tokens."""
        self.evaluation = path / "evaluation.json"
        """The results of the last `evaluate` on the run's own validation data."""
        self.checkpoints = path / "checkpoints"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model.keras"
        """The trained model, for Keras."""
        self.curves = path / "curves.png"
        """Loss and accuracy over steps."""


def default_path(recipe: str) -> Path:
    """Return an unused path for a new run of `recipe`."""
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [RUNS / stem, *(RUNS / f"{stem}-{number}" for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def create(path: Path) -> None:
    """Create the folder of a new run.

    Raises:
        ConfigError: it exists and is not empty, or cannot be created.
    """
    refuse_occupied(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {path} cannot be created: {error.strerror} ({error.filename}).") from error


def refuse_occupied(path: Path) -> None:
    """Refuse a folder that is not empty, before any work is done.

    Raises:
        ConfigError: it is not empty.
    """
    if path.is_dir() and any(entry.name != lock.NAME for entry in path.iterdir()):
        raise ConfigError(
            f"--run-dir {path} is not empty: nothing in it is overwritten. Name another folder, or go on with the run "
            f"in it by --resume {path}."
        )


def opened(path: Path, option: str, files: FilesRead | None = None) -> tuple[RunFolder, Config]:
    """Return the folder of an earlier run and its configuration, which `files` reads.

    Raises:
        CheckpointError: there is no run at `path`.
    """
    folder, files = RunFolder(path), files or FilesRead()
    if not files.exists(folder.config):
        raise CheckpointError(f"{option} {path}: there is no run (no {folder.config.name} in it).")
    values = read_values(folder.config, files)
    recipe = str(values.get("recipe", ""))
    return folder, apply_values(Config(recipe), values, str(folder.config))
