"""Encoded images in one folder for each class, `[train/ | validation/]CLASS/IMAGE`, also within a tar file."""

import posixpath
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.blobs import Blobs
from hvdtrain.data.files import files_below, is_there, seekable

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
SPLITS = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
}
"""Split that a folder above the class folders stands for, by its name."""
HELD = ("validation", "test")
"""Splits to validate on, in the order of preference."""
TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
BLOCK_BYTES = 512
MOST_LINKS = 40
"""Length of a chain of links; the kernel follows as many."""


@dataclass(frozen=True)
class Found:
    """Encoded images found on disk, with their labels, sorted by name."""

    path: Path
    blobs: Blobs
    names: list[str]
    """Each image's path below the class folders' parents: `cat/0001.jpg`."""
    labels: np.ndarray
    """[images] int32, indices into `classes`."""
    classes: list[str]
    """Names of the class folders, sorted."""
    splits: np.ndarray
    """[images] `train`, `validation` or `test`; all `train` if there are no such folders."""


class _Piece(NamedTuple):
    name: PurePosixPath
    file: Path
    offset: int
    length: int


def scan(path: Path) -> Found:
    """Find the images below a folder, or within a tar file.

    Raises:
        DataError: there are no images, or the tar file has members outside its own folder.
    """
    is_folder = path.is_dir()
    if not is_folder and not path.name.lower().endswith(TAR_SUFFIXES):
        raise DataError(f"{path} is neither a folder of class folders nor a tar file of them. See --data-args path.")
    pieces = _images_in(path)
    splits, names = _without_splits(path, [piece.name for piece in pieces])
    known = {name.parts[0] for name, split in zip(names, splits, strict=True) if split == "train"}
    if not known:
        raise DataError(f"{path} has no folder for training: it needs train/CLASS/IMAGE.")
    classes = sorted({name.parts[0] for name in names})
    strange = next((name for name in classes if name not in known), None)
    if strange is not None:
        raise DataError(f"{path} has the class {strange!r} for validation, but not for training.")
    number = {name: place for place, name in enumerate(classes)}
    several = len(set(splits)) > 1
    return Found(
        path=path,
        blobs=_blobs(
            pieces,
            names=lambda n: str(path / pieces[n].name) if is_folder else f"{path}, {pieces[n].name}",
            known_as=[f"{part}/{name}" if several else str(name) for part, name in zip(splits, names, strict=True)],
        ),
        names=[name.as_posix() for name in names],
        labels=np.array([number[name.parts[0]] for name in names], np.int32),
        classes=classes,
        splits=np.array(splits),
    )


def images_at(paths: Sequence[Path]) -> tuple[Blobs, list[str]]:
    """Find images in files, folders (recursively) and tar files, without regard to class folders.

    Args:
        paths: image files, folders and tar files; those in a folder or tar file are sorted by name.

    Returns:
        The encoded images, and the path of each: those in a tar file begin with the file's.

    Raises:
        DataError: a path does not exist, or holds no images.
    """
    pieces: list[_Piece] = []
    for path in paths:
        if not is_there(path):
            raise DataError(f"There is no {path.absolute()}.")
        pieces += [piece._replace(name=PurePosixPath(path) / piece.name) for piece in _images_in(path)]
    names = [str(piece.name) for piece in pieces]
    return _blobs(pieces, names=names.__getitem__, known_as=names), names


def _images_in(path: Path) -> list[_Piece]:
    """Return the images of a folder or tar file, sorted by name, or the file `path` itself."""
    if path.is_dir():
        files = (file for file in files_below(path) if is_image(file.name))
        pieces = [_Piece(PurePosixPath(file.relative_to(path)), file, 0, _length(file)) for file in files]
    elif path.name.lower().endswith(TAR_SUFFIXES):
        pieces = _in_tar(path)
    else:
        return [_Piece(PurePosixPath(), path, 0, _length(path))]
    if not pieces:
        raise DataError(f"{path} holds no images ({', '.join(IMAGE_SUFFIXES)}) in class folders.")
    return sorted(pieces, key=lambda piece: piece.name)


def _length(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError as error:  # a link to what is gone
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None


def _in_tar(path: Path) -> list[_Piece]:
    plain = seekable(path)
    try:
        with tarfile.open(plain, "r:") as archive:
            found = _files_within(archive, path)
    except tarfile.TarError as error:
        raise DataError(f"{path} is not a tar file, or damaged: {error}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
    images = ((name, member) for name, member in found.items() if is_image(name.name))
    return [_Piece(name, plain, member.offset_data, member.size) for name, member in images]


def is_image(name: str) -> bool:
    """Return whether a file is named like an image."""
    return not name.startswith(".") and name.lower().endswith(IMAGE_SUFFIXES)


def _without_splits(path: Path, names: Sequence[PurePosixPath]) -> tuple[list[str], list[PurePosixPath]]:
    """Return the split of each image, and its path from the class folder down."""
    parts = [name.parts for name in names]
    short = next((name for name, part in zip(names, parts, strict=True) if len(part) < 2), None)
    if short is not None:
        raise DataError(f"{path} holds {short} outside of any class folder.")
    while len({part[0] for part in parts}) == 1 and min(map(len, parts)) > 2:
        parts = [part[1:] for part in parts]  # a folder that holds everything says nothing
    split = all(part[0].lower() in SPLITS and len(part) > 2 for part in parts)
    splits = [SPLITS[part[0].lower()] if split else "train" for part in parts]
    return splits, [PurePosixPath(*part[split:]) for part in parts]


def _blobs(pieces: Sequence[_Piece], *, names: Callable[[int], str], known_as: Sequence[str]) -> Blobs:
    files = sorted({piece.file for piece in pieces})
    number = {file: place for place, file in enumerate(files)}
    return Blobs(
        files,
        np.array([number[piece.file] for piece in pieces]),
        np.array([piece.offset for piece in pieces]),
        np.array([piece.length for piece in pieces]),
        names=names,
        known_as=known_as,
    )


def _files_within(archive: tarfile.TarFile, path: Path) -> dict[PurePosixPath, tarfile.TarInfo]:
    """Return the files of an open archive by name, without hidden ones; links are resolved.

    Raises:
        DataError: the archive `path` is damaged, has members outside its own folder, or dangling links.
    """
    found = {}
    for member in archive:
        name = PurePosixPath(member.name)
        if name.is_absolute() or ".." in name.parts:
            raise DataError(f"{path} has a member outside of its own folder: {member.name!r}.")
        if not any(part.startswith(".") for part in name.parts):
            found[name] = member
    # Python's tarfile takes a bad header for the end of the archive.
    file: Any = archive.fileobj
    file.seek(archive.offset)
    if file.read(BLOCK_BYTES) != bytes(BLOCK_BYTES):
        last = archive.getnames()[-1:] or ["its start"]
        raise DataError(
            f"{path} is not a tar file, or damaged: its end is missing, and what comes after {last[0]} cannot be read."
        )
    followed = {name: _followed(found, name, path) for name in found}
    return {name: member for name, member in followed.items() if member.isreg()}


def _followed(found: dict[PurePosixPath, tarfile.TarInfo], name: PurePosixPath, path: Path) -> tarfile.TarInfo:
    """Return the member `name`; if it is a link, the file that it leads to."""
    member = found[name]
    if not (member.islnk() or member.issym()):
        return member
    target: tarfile.TarInfo | None = member
    for _ in range(MOST_LINKS):
        if target is None or not (target.islnk() or target.issym()):
            break
        # A hard link names a member, a symbolic one a path relative to its folder.
        folder = posixpath.dirname(target.name) if target.issym() else ""
        target = found.get(PurePosixPath(posixpath.normpath(posixpath.join(folder, target.linkname))))
    if target is not None and target.isreg():
        return target
    raise DataError(
        f"{path}: {name} is a link to {member.linkname}, which is not a file in it. Make the archive again with "
        "tar --dereference, which puts in what links lead to."
    )
