"""The members of a tar file: all of them, or an error that names the damage."""

import posixpath
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from hvdtrain.config.errors import DataError

BLOCK_BYTES = 512
MOST_LINKS = 40
"""Length of a chain of links; the kernel follows as many."""


def members(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an open archive.

    Raises:
        DataError: the archive `path` is damaged or cut off. Python's tarfile takes a bad header for the end.
    """
    yield from archive
    file: Any = archive.fileobj
    file.seek(archive.offset)
    if file.read(BLOCK_BYTES) != bytes(BLOCK_BYTES):
        last = archive.getnames()[-1:] or ["its start"]
        raise DataError(
            f"{path} is no tar file, or damaged: its end is missing, and what comes after {last[0]} cannot be read."
        )


def files_within(archive: tarfile.TarFile, path: Path) -> dict[PurePosixPath, tarfile.TarInfo]:
    """Return the files of an open archive by name, without hidden ones; links are resolved.

    Raises:
        DataError: the archive `path` is damaged, has members outside its own folder, or dangling links.
    """
    found = {}
    for member in members(archive, path):
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise DataError(f"{path} has a member outside of its own folder: {member.name!r}.")
        if not any(part.startswith(".") for part in name.parts):
            found[name] = member
    followed = {name: _followed(found, name, path) for name in found}
    return {name: member for name, member in followed.items() if member.isreg()}


def _followed(found: dict[PurePosixPath, tarfile.TarInfo], name: PurePosixPath, path: Path) -> tarfile.TarInfo:
    """Return the member `name`, with links resolved."""
    member = found.get(name)
    for _ in range(MOST_LINKS):
        if member is None or not _is_link(member):
            break
        member = found.get(_target(member))
    if member is not None and (member.isreg() or not _is_link(found[name])):
        return member
    raise DataError(
        f"{path}: {name} is a link to {found[name].linkname}, which is no file in it. Make the archive anew with tar "
        "--dereference, which puts in what links lead to."
    )


def _is_link(member: tarfile.TarInfo) -> bool:
    return member.islnk() or member.issym()


def _target(member: tarfile.TarInfo) -> PurePosixPath:
    """Return a link's target: a hard link names a member, a symbolic one a path relative to its folder."""
    way = member.linkname
    if member.issym():
        way = posixpath.join(posixpath.dirname(member.name), way)
    return PurePosixPath(posixpath.normpath(way))
