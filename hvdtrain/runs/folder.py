"""The folder of a run: its files, creation and reopening."""

import time
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint import lock
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.config.files import FilesRead, apply_values, read_values
from hvdtrain.config.run import Config

RUNS = Path("runs")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    @property
    def config(self) -> Path:
        """The configuration as it was declared; `--config` on it reproduces the run."""
        return self.path / "config.yaml"

    @property
    def environment(self) -> Path:
        """Versions, machine and settings."""
        return self.path / "env.json"

    @property
    def metrics(self) -> Path:
        """One JSON object for each logged step and evaluation."""
        return self.path / "metrics.jsonl"

    @property
    def logs(self) -> Path:
        """What each rank logged."""
        return self.path / "logs"

    @property
    def summary(self) -> Path:
        """The results of the run."""
        return self.path / "summary.json"

    @property
    def preprocessing(self) -> Path:
        """How data are prepared for the model, and what its outputs are."""
        return self.path / "preprocessing.json"

    @property
    def tokenizer(self) -> Path:
        """The sentencepiece model of a text's tokens."""
        return self.path / "tokenizer.model"

    @property
    def evaluation(self) -> Path:
        """The results of the last `evaluate` on the run's own validation data."""
        return self.path / "evaluation.json"

    @property
    def checkpoints(self) -> Path:
        """The saved training states."""
        return self.path / "checkpoints"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard's event files."""
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        """The trained model, for Keras."""
        return self.path / "model.keras"

    @property
    def curves(self) -> Path:
        """Loss and accuracy over steps."""
        return self.path / "curves.png"


def default_path(recipe: str) -> Path:
    """Return an unused path for a new run of `recipe`."""
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [RUNS / stem, *(RUNS / f"{stem}-{number}" for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def create(path: Path) -> RunFolder:
    """Create the folder of a new run.

    Raises:
        ConfigError: it exists and is not empty, or cannot be created.
    """
    refuse_occupied(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {path} cannot be created: {error.strerror} ({error.filename}).") from error
    return RunFolder(path)


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
