"""Relative paths and modules in a run's configuration: found again from any folder."""

import json
from dataclasses import replace
from pathlib import Path

from hvdtrain.config.errors import DataError
from hvdtrain.config.files import FilesRead
from hvdtrain.config.model import Scalar
from hvdtrain.config.run import Config
from hvdtrain.config.user_code import import_from, is_user_code
from hvdtrain.data.files import find_data, is_there
from hvdtrain.runs.folder import RunFolder

PATHS = ("path", "validation_path", "features")
"""Arguments of the data sources that are files or folders."""
OWN_PATHS = ("path", "file", "folder", "dir", "directory", "root")
"""Ends of the names of arguments that are taken for files or folders in a user's own function."""
PATTERN = "*?["


def start_folder(folder: RunFolder, files: FilesRead | None = None) -> Path | None:
    """Return the working folder in which a run was started; None if an earlier version wrote the run."""
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
