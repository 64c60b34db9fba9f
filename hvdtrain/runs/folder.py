"""The folder of a run: its files, creation and reopening, and where its configuration's relative paths begin."""

import json
import time
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoint import lock
from hvdtrain.config.errors import CheckpointError, ConfigError, DataError
from hvdtrain.config.files import FilesRead, apply_values, read_values
from hvdtrain.config.model import Scalar
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import import_from, is_user_code
from hvdtrain.data.files import find_data, is_there

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
        self.adapters = path / "adapters.safetensors"
        """Adapters of the trained model alone, for `hvdtrain.load_lora`."""
        self.curves = path / "curves.png"
        """Loss and accuracy over steps."""


def run_of(folder: Path) -> RunFolder | None:
    """Return the run in `folder`, or whose checkpoints these are; None if they are a script's."""
    resolved = folder.resolve()
    for path in (resolved, *[above.parent for above in (resolved, resolved.parent) if above.name == "checkpoints"]):
        if RunFolder(path).config.is_file():
            return RunFolder(path)
    return None


def default_path(name: str) -> Path:
    """Return an unused path for a new run that is called `name`."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [RUNS / stem, *(RUNS / f"{stem}-{number}" for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def create(path: Path) -> None:
    """Create the folder of a new run.

    Raises:
        ConfigError: it holds something, or cannot be created.
    """
    refuse_occupied(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run-dir {path} cannot be created: {error.strerror} ({error.filename}).") from error


def refuse_occupied(path: Path) -> None:
    """Refuse a folder that holds anything but a run that trained nothing, before any work is done.

    Raises:
        ConfigError: it holds something.
    """
    if path.is_dir() and any(entry.name != lock.NAME for entry in path.iterdir()) and not _trained_nothing(path):
        raise ConfigError(
            f"--run-dir {path} is not empty: nothing in it is overwritten. Name another folder, or go on with the run "
            f"in it by --resume {path}."
        )


def _trained_nothing(path: Path) -> bool:
    """Return whether a folder has the first files of a run alone: it was refused, or ended, before a step was noted."""
    run = RunFolder(path)
    begun = {run.config, run.environment, run.preprocessing, run.tokenizer, run.metrics, run.checkpoints, run.logs}
    written = [run.metrics.stat().st_size] if run.metrics.exists() else []
    return (
        run.config.exists()
        and set(path.iterdir()) <= begun | {run.tensorboard, path / lock.NAME}
        and not any(written)
        and not (run.checkpoints.exists() and any(run.checkpoints.iterdir()))
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


PATHS = ("path", "validation_path", "features")
"""Arguments of the data sources that are files or folders."""
OWN_PATHS = ("path", "file", "folder", "dir", "directory", "root")
"""Ends of the names of arguments that are taken for files or folders in a user's own function."""
PATTERN = "*?["


def start_folder(folder: RunFolder, files: FilesRead | None = None) -> Path | None:
    """Return the working folder in which a run was started; None if none is recorded in `folder`."""
    try:
        recorded = json.loads((files or FilesRead()).text(folder.environment)).get("folder")
    except (OSError, ValueError, AttributeError):
        return None
    return Path(recorded) if isinstance(recorded, str) else None


def located(config: Config, start: Path | None) -> Config:
    """Return `config` with absolute paths for the data that are below `start`, and search modules there first.

    Args:
        config: as it was declared.
        start: the folder in which relative paths begin; None: the working folder.
    """
    if start is None or start == Path.cwd():
        return config
    import_from(start)
    data = config.data
    arguments = {
        name: _absolute(start, value) if _is_relative(config, name, value) and _exists(start, value) else value
        for name, value in data.data_args.items()
    }
    return replace(config, data=replace(data, data_args=arguments))


def check_located(config: Config, start: Path | None) -> Config:
    """Return `config`, as `located` does or changed since, if its data are somewhere.

    Raises:
        DataError: data of one of our sources are neither below `start` nor where paths are looked up otherwise.
    """
    if start is None or start == Path.cwd() or is_user_code(config.data.data):
        return config
    for name, value in config.data.data_args.items():
        if _is_relative(config, name, value) and not set(PATTERN) & set(str(value)):
            try:
                find_data(str(value))
            except DataError as error:
                raise DataError(f"{error.message} Nor is it in {start}, where the run was started.") from None
    return config


def given_here(base: Config, config: Config) -> Config:
    """Return `config` with absolute paths for what was not in `base`: it was given in the working folder."""
    given = dict(config.data.data_args)
    for name, value in given.items():
        if value != base.data.data_args.get(name) and _is_relative(config, name, value) and _exists(Path.cwd(), value):
            given[name] = _absolute(Path.cwd(), value)
    return replace(config, data=replace(config.data, data_args=given))


def _absolute(folder: Path, value: Scalar) -> str:
    return str(folder / Path(str(value)).expanduser())


def _is_relative(config: Config, name: str, value: Scalar) -> bool:
    known = name in PATHS or (is_user_code(config.data.data) and name.lower().endswith(OWN_PATHS))
    return known and isinstance(value, str) and value != "" and not Path(value).expanduser().is_absolute()


def _exists(folder: Path, value: Scalar) -> bool:
    text = str(value)
    if set(PATTERN) & set(text):
        return next(folder.glob(text), None) is not None
    return is_there(folder / Path(text).expanduser())
