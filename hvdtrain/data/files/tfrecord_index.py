"""Finding TFRecord files, and indexing the records in them."""

import glob
import hashlib
import itertools
import os
import re
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.class_folders import is_image
from hvdtrain.data.files.locations import DATA_VARIABLE, cache_folder, cache_key, find_data
from hvdtrain.data.files.tfrecord_file import OPENERS, Index, compression, masked_checksum, read_index
from hvdtrain.data.files.unpacked import made_once, seekable, writing_into
from hvdtrain.data.files.walking import files_below

INDEXED_AT_ONCE = 8
"""Files indexed at a time: on a network file system that is waiting, not work."""
_SHARD = re.compile(r"(.+)-\d+-of-(\d+)")
_IS_RECORD_FILE = re.compile(r"\.(tfrecords?|tfrec)(\.(gz|zlib))?$|-\d+-of-\d+(\.\w+)?$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Records:
    """The records of several files, numbered consecutively."""

    folder: Path
    """Folder of the first file."""
    names: list[str]
    """Name of each file in messages."""
    files: list[Path]
    """Uncompressed file for each name."""
    file_of: np.ndarray
    """[records] int64, ascending: index into `files`."""
    index: Index

    def __len__(self) -> int:
        return len(self.file_of)

    def place(self, number: int) -> str:
        """Return the file of record `number`, and its number within it, from 0."""
        file = int(self.file_of[number])
        return f"{self.names[file]}, record {number - int(self._firsts[file])}"

    def read(self, number: int) -> bytes:
        """Return the bytes of record `number` unchecked; fewer if the file is cut off.

        Raises:
            DataError: the file cannot be read.
        """
        try:
            with open(self.files[int(self.file_of[number])], "rb") as file:
                return os.pread(file.fileno(), int(self.index.lengths[number]), int(self.index.offsets[number]))
        except OSError as error:
            raise DataError(f"{error.filename or self.place(number)} cannot be read: {error.strerror}.") from None

    def is_whole(self, data: bytes, number: int) -> bool:
        """Whether `data` match the checksum of record `number`."""
        return masked_checksum(data) == int(self.index.checksums[number])

    def fingerprint(self) -> bytes:
        """Return a hash [32 bytes] of the records' checksums and lengths, and thus of their contents."""
        digest = hashlib.sha256(self.index.lengths.tobytes())
        digest.update(self.index.checksums.tobytes())
        return digest.digest()

    def listing(self) -> list[str]:
        """Return the name, number of records and a combined checksum of each file."""
        parts = np.split(self.index.checksums, self._firsts[1:])
        facts = zip(self.names, parts, strict=True)
        return [f"{name} ({len(part):,} records, checksum {zlib.crc32(part.tobytes()):08x})" for name, part in facts]

    @cached_property
    def _firsts(self) -> np.ndarray:
        """[files] number of each file's first record."""
        return np.searchsorted(self.file_of, np.arange(len(self.files)))


def record_files(path: str) -> list[Path]:
    """Return the TFRecord files of `path`: a file, a folder searched recursively, or a pattern with * and ?.

    Raises:
        DataError: there are none.
    """
    if glob.has_magic(path) and not Path(path).expanduser().exists():
        return _matching(path)
    found = find_data(path)
    if not found.is_dir():
        return [found]
    files = sorted(file for file in files_below(found) if is_record_file(file))
    if not files:
        raise DataError(f"{found} holds no TFRecord files (*.tfrecord, or names such as train-00000-of-00008).")
    _refuse_missing_shards(files)
    return files


def _refuse_missing_shards(files: Sequence[Path]) -> None:
    """Refuse a folder of `NAME-00000-of-00008` … that lacks some of its files."""
    shards = [(file.parent / part[1], int(part[2]), file) for file in files if (part := _SHARD.match(file.name))]
    for (series, expected), mine in itertools.groupby(shards, key=lambda shard: shard[:2]):
        count = sum(1 for _ in mine)
        if count < expected:
            raise DataError(
                f"{series.parent} holds {count} of {expected} files {series.name}-*-of-*: some are missing. Name those "
                "to read by a pattern, as in path 'DIR/train-*'."
            )


def is_record_file(file: Path) -> bool:
    """Whether a file is named like a TFRecord file; photo-1-of-3.png is not."""
    name = file.name.lower()
    return bool(_IS_RECORD_FILE.search(name)) and not name.startswith(".") and not is_image(name) and file.is_file()


def _matching(pattern: str) -> list[Path]:
    for base in ("", os.environ.get(DATA_VARIABLE, "")):
        names = glob.glob(os.path.join(base, os.path.expanduser(pattern)), recursive=True)
        files = sorted(Path(name) for name in names if os.path.isfile(name))
        if files:
            return files
    raise DataError(f"No file matches {pattern!r}, here or in the folder {DATA_VARIABLE}. See --data-args path.")


def records_of(files: Sequence[Path]) -> Records:
    """Index the records of all `files`. Indices and uncompressed copies of files are cached.

    Raises:
        DataError: a damaged file, or no records at all.
    """
    with ThreadPoolExecutor(INDEXED_AT_ONCE) as pool:
        found = list(pool.map(_indexed, files))
    plain, indexes = [file for file, _ in found], [index for _, index in found]
    counts = [len(index.offsets) for index in indexes]
    if not sum(counts):
        raise DataError(f"There are no records in {', '.join(map(str, files[:3]))}{', …' if len(files) > 3 else ''}.")
    together = Index(*(np.concatenate(parts) for parts in zip(*indexes, strict=True)))
    return Records(
        folder=files[0].parent,
        names=short_names(files),
        files=plain,
        file_of=np.repeat(np.arange(len(files)), counts),
        index=together,
    )


def uncompressed(file: Path) -> Path:
    """Return an uncompressed copy of `file`, or `file` itself.

    Raises:
        DataError: it cannot be read or decompressed.
    """
    try:
        packed = compression(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    return seekable(file, OPENERS[packed]) if packed else file


def short_names(files: Sequence[Path]) -> list[str]:
    """Return paths relative to the common folder of `files`."""
    common = os.path.commonpath([file.absolute().parent for file in files])
    return [str(file.absolute().relative_to(common)) for file in files]


def _indexed(file: Path) -> tuple[Path, Index]:
    plain = uncompressed(file)
    target = cache_folder() / f"{cache_key(plain, 'tfrecord index')}.npz"
    with made_once(target) as draft:
        if draft is not None:
            index = read_index(plain, str(file))
            with writing_into(target.parent), open(draft, "wb") as out:
                np.savez(out, **index._asdict())
    with np.load(target) as arrays:
        return plain, Index(**arrays)
