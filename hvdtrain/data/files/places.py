"""Where data are found and where what is made of them is kept."""

import hashlib
import os
from pathlib import Path

from hvdtrain.config.errors import DataError

DATA_VARIABLE = "HVDTRAIN_DATA"
CACHE_VARIABLE = "HVDTRAIN_CACHE"


def find_data(path: str) -> Path:
    """Return the file or folder `path`; one that is not there is looked for in the folder HVDTRAIN_DATA.

    Raises:
        DataError: it is in neither place, or it cannot be told.
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
    """Tell whether there is a file or folder `path`.

    Raises:
        DataError: a folder on the way to it is closed to us.
    """
    try:
        return path.exists()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def cache_folder() -> Path:
    """Return the folder for what can be made again: HVDTRAIN_CACHE, or hvdtrain in the user's cache; it is made."""
    chosen = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(chosen) if chosen else Path(base) / "hvdtrain"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The cache {folder} cannot be made: {error.strerror}. Set {CACHE_VARIABLE}.") from None
    return folder


def cache_key(path: Path, *what: str) -> str:
    """Return a name for what is made of a file: another one as soon as the file's size or time of change differs."""
    facts = path.stat()
    text = "\0".join([str(path.resolve()), str(facts.st_size), str(facts.st_mtime_ns), *what])
    return hashlib.sha256(text.encode()).hexdigest()[:24]
