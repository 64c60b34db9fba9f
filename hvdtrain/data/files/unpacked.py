"""Compressed files, decompressed once into the cache for random access."""

import bz2
import gzip
import lzma
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.locations import CACHE_VARIABLE, cache_folder, cache_key
from hvdtrain.runtime.file_lock import lock

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


def seekable(path: Path, opener: Opener | None = None) -> Path:
    """Return an uncompressed copy of `path`, or `path` itself if it is not compressed.

    The first process of a host decompresses it into the cache while the others wait; later runs find it there.

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


@contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """Yield a draft path to the one process that makes `target`; None to all others, once it exists.

    The draft is renamed to `target` if the block succeeds, and removed if it fails.

    Raises:
        DataError: the folder of `target` is not writable.
    """
    with _locked(target.with_name(f"{target.name}.lock")):
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


def _locked(file: Path) -> IO[str]:
    """Open a file under an exclusive lock."""
    with writing_into(file.parent):
        opened = open(file, "w")  # noqa: SIM115 - closed by the caller
        lock(opened.fileno(), wait=True)
        return opened


def _unpack(path: Path, opener: Opener, draft: Path) -> None:
    try:
        with opener(path) as packed, open(draft, "wb") as plain:
            shutil.copyfileobj(packed, plain, 2**20)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is damaged and cannot be unpacked: {error}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be unpacked into {draft.parent}: {error.strerror or error}.") from None
