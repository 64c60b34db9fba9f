"""Recursive listing of files."""

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from hvdtrain.config.errors import DataError

Identity = tuple[int, int]


def files_below(folder: Path, above: frozenset[Identity] = frozenset()) -> Iterator[Path]:
    """Yield the files below `folder`, sorted by name, without hidden files and folders.

    Links are followed, except to a folder above them, which is listed already.

    Args:
        folder: the root.
        above: device and inode of each folder above it.

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
