"""Files of samples: where they are looked up, and how they are unpacked into the cache."""

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

from filelock import FileLock

from hvdtrain.config.errors import DataError

DATA_VARIABLE = "HVDTRAIN_DATA"
CACHE_VARIABLE = "HVDTRAIN_CACHE"
Opener = Callable[[Path], IO[bytes]]
OPENERS: dict[str, Any] = {
    ".gz": gzip.open,
    ".tgz": gzip.open,
    ".bz2": bz2.open,
    ".tbz2": bz2.open,
    ".xz": lzma.open,
    ".txz": lzma.open,
}
"""Opens a compressed file, by its suffix."""
Identity = tuple[int, int]


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
    """Return whether a file or folder exists.

    Raises:
        DataError: a folder on the way to it cannot be read.
    """
    try:
        return path.exists()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def files_below(folder: Path, above: frozenset[Identity] = frozenset()) -> Iterator[Path]:
    """Yield the files below `folder`, sorted by name, without hidden ones.

    Links are followed, except to a folder of `above`, which is listed already.

    Raises:
        DataError: a folder cannot be read.
    """
    try:
        facts = folder.stat()
        with os.scandir(folder) as found:
            entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=attrgetter("name"))
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None
    me = (facts.st_dev, facts.st_ino)
    if me in above:
        return
    for entry in entries:
        if entry.is_dir():
            yield from files_below(Path(entry.path), above | {me})
        else:
            yield Path(entry.path)


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
    """Return the cache's name for something derived from a file, by the file's size and modification time."""
    facts = path.stat()
    text = "\0".join([str(path.resolve()), str(facts.st_size), str(facts.st_mtime_ns), *what])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """Yield a draft path to the one process that makes `target`; None to all others, once it exists.

    The draft is renamed to `target` if the block succeeds, and removed if it fails.

    Raises:
        DataError: the folder of `target` is not writable.
    """
    with writing_into(target.parent):
        claim = FileLock(target.with_name(f"{target.name}.lock")).acquire()
    with claim:
        if target.exists():
            yield None
            return
        draft = target.with_name(f"{target.name}.{os.getpid()}.draft")
        try:
            yield draft
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Turn an OSError inside the block into a DataError that names the cache `folder`."""
    try:
        yield
    except OSError as error:
        raise DataError(f"The cache {folder} cannot be written: {error.strerror}. Set {CACHE_VARIABLE}.") from None


def seekable(path: Path, opener: Opener | None = None) -> Path:
    """Return an uncompressed copy of `path`, or `path` itself if it is not compressed.

    The first process of a host unpacks it into the cache while the others wait; later runs find it there.

    Args:
        path: the file.
        opener: opens it for reading decompressed; None chooses by its suffix.

    Raises:
        DataError: it is damaged, or the disk is full.
    """
    opener = opener or OPENERS.get(path.suffix.lower())
    if opener is None:
        return path
    target = cache_folder() / f"{cache_key(path, 'unpacked')}-{path.stem}"
    with made_once(target) as draft:
        if draft is not None:
            _unpack(path, opener, draft)
    return target


def _unpack(path: Path, opener: Opener, draft: Path) -> None:
    try:
        with opener(path) as packed, open(draft, "wb") as plain:
            shutil.copyfileobj(packed, plain, 2**20)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is damaged and cannot be unpacked: {error}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be unpacked into {draft.parent}: {error.strerror or error}.") from None
