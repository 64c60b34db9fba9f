"""Folders: where data are looked up, and where derived files are cached."""

import hashlib
import os
from pathlib import Path

from hvdtrain.config.errors import DataError

DATA_VARIABLE = "HVDTRAIN_DATA"
CACHE_VARIABLE = "HVDTRAIN_CACHE"


def find_data(path: str) -> Path:
    """Return the file or folder `path`, looked up in the folder HVDTRAIN_DATA if it does not exist.

    Raises:
        DataError: it exists in neither place, or a folder cannot be read.
    """
    if not path:
        raise DataError("This data source needs a file or folder: --data-args path PATH.")
    here = Path(path).expanduser()
    if is_there(here):
        return here
    folder = os.environ.get(DATA_VARIABLE)
    if folder and not here.is_absolute() and is_there(Path(folder) / here):
        return Path(folder) / here
    looked = f", nor is it in {DATA_VARIABLE} ({folder})" if folder else f" ({DATA_VARIABLE} names no folder either)"
    raise DataError(f"There is no {here.absolute()}{'' if here.is_absolute() else looked}. See --data-args path.")


def is_there(path: Path) -> bool:
    """Whether the file or folder `path` exists.

    Raises:
        DataError: a folder on the way to it cannot be read.
    """
    try:
        return path.exists()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def cache_folder() -> Path:
    """Create and return the cache folder: HVDTRAIN_CACHE, or hvdtrain in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(chosen) if chosen else Path(base) / "hvdtrain"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The cache {folder} cannot be made: {error.strerror}. Set {CACHE_VARIABLE}.") from None
    return folder


def cache_key(path: Path, *what: str) -> str:
    """Return a name for something derived from a file; it changes with the file's size or modification time."""
    facts = path.stat()
    text = "\0".join([str(path.resolve()), str(facts.st_size), str(facts.st_mtime_ns), *what])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
