"""TFRecord files: the format, and an index of the records, kept in the cache, by which they are read at random.

A file is a sequence of records, each with four fields:

    length       8 bytes, little-endian: how many bytes of data follow
    checksum     4 bytes: masked CRC-32C of the length
    data         as many bytes as the length says
    checksum     4 bytes: masked CRC-32C of the data
"""

import glob
import gzip
import hashlib
import io
import itertools
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import google_crc32c
import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.files import (
    DATA_VARIABLE,
    cache_folder,
    cache_key,
    files_below,
    find_data,
    made_once,
    seekable,
    writing_into,
)
from hvdtrain.data.sources.class_folders import is_image

INDEXED_AT_ONCE = 8
"""Files indexed at a time: on a network file system that is waiting, not work."""
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
FOOTER_BYTES = _CHECKSUM.size
_SHARD = re.compile(r"(.+)-\d+-of-(\d+)")
_IS_RECORD_FILE = re.compile(r"\.(tfrecords?|tfrec)(\.(gz|zlib))?$|-\d+-of-\d+(\.\w+)?$", re.IGNORECASE)


class Index(NamedTuple):
    """Offsets, lengths and masked checksums of the records of a file."""

    offsets: np.ndarray
    """[records] int64, bytes."""
    lengths: np.ndarray
    """[records] int64, bytes."""
    checksums: np.ndarray
    """[records] uint32."""


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
        """Return whether `data` match the checksum of record `number`."""
        return masked_checksum(data) == int(self.index.checksums[number])

    def fingerprint(self) -> bytes:
        """Return a hash [32 bytes] of the records' checksums and lengths, and thus of their contents."""
        return hashlib.sha256(self.index.lengths.tobytes() + self.index.checksums.tobytes()).digest()

    def listing(self) -> list[str]:
        """Return the name, number of records and a combined checksum of each file."""
        parts = np.split(self.index.checksums, self._firsts[1:])
        facts = zip(self.names, parts, strict=True)
        return [f"{name} ({len(part):,} records, checksum {zlib.crc32(part.tobytes()):08x})" for name, part in facts]

    @cached_property
    def _firsts(self) -> np.ndarray:
        """[files] number of each file's first record."""
        return np.searchsorted(self.file_of, np.arange(len(self.files)))


def records_of(files: Sequence[Path]) -> Records:
    """Index the records of all `files`. Indices and uncompressed copies of files are cached.

    Raises:
        DataError: a damaged file, or no records at all.
    """
    with ThreadPoolExecutor(INDEXED_AT_ONCE) as pool:
        found = list(pool.map(_indexed, files))
    indexes = [index for _, index in found]
    counts = [len(index.offsets) for index in indexes]
    if not sum(counts):
        raise DataError(f"There are no records in {', '.join(map(str, files[:3]))}{', …' if len(files) > 3 else ''}.")
    common = os.path.commonpath([file.absolute().parent for file in files])
    return Records(
        folder=files[0].parent,
        names=[str(file.absolute().relative_to(common)) for file in files],
        files=[file for file, _ in found],
        file_of=np.repeat(np.arange(len(files)), counts),
        index=Index(*(np.concatenate(parts) for parts in zip(*indexes, strict=True))),
    )


def _indexed(file: Path) -> tuple[Path, Index]:
    """Return an uncompressed copy of a file, or the file itself, and its index."""
    try:
        packed = compression(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    openers: dict[str, Any] = {"gzip": gzip.open, "zlib": ZlibFile}
    plain = seekable(file, openers[packed]) if packed else file
    target = cache_folder() / f"{cache_key(plain, 'tfrecord index')}.npz"
    with made_once(target) as draft:
        if draft is not None:
            index = read_index(plain, str(file))
            with writing_into(target.parent), open(draft, "wb") as out:
                np.savez(out, **index._asdict())
    with np.load(target) as arrays:
        return plain, Index(**arrays)


def read_index(path: Path, name: str = "") -> Index:
    """Return the index of an uncompressed file, without reading the records' data.

    Raises:
        DataError: a damaged length, or a file that ends within a record; `name` (or the path) and the record are named.
    """
    table = np.array(list(_walk(path, name or str(path))), np.int64).reshape(-1, 3)
    return Index(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].astype(np.uint32))


def _walk(path: Path, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield offset, length and masked checksum of each record."""
    size, place = path.stat().st_size, 0
    with open(path, "rb") as file:
        for number in itertools.count():
            if place >= size:
                return
            begin, length = place + HEADER_BYTES, _length(file, f"{name}, record {number}")
            place = begin + length + FOOTER_BYTES
            if place > size:
                raise DataError(f"{name}, record {number}: the file ends {place - size} bytes too early.")
            file.seek(begin + length)
            yield begin, length, _CHECKSUM.unpack(file.read(FOOTER_BYTES))[0]


def _length(file: BinaryIO, where: str) -> int:
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise DataError(f"{where}: the file ends {HEADER_BYTES - len(header)} bytes too early.")
    if not _has_right_length(header):
        raise DataError(f"{where}: its length is damaged, or this is not a TFRecord file (the checksum is wrong).")
    return int(_LENGTH.unpack(header[: _LENGTH.size])[0])


def masked_checksum(data: bytes) -> int:
    """Return the CRC-32C of `data`, masked as TFRecord does, since data may themselves hold checksums."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _has_right_length(header: bytes) -> bool:
    length, checksum = header[: _LENGTH.size], header[_LENGTH.size : HEADER_BYTES]
    return len(header) >= HEADER_BYTES and checksum == _CHECKSUM.pack(masked_checksum(length))


def compression(path: Path) -> str:
    """Return "gzip" or "zlib" for a compressed TFRecord file, else ""."""
    with open(path, "rb") as file:
        start = file.read(HEADER_BYTES)
    # A length may look like the magic number of a compressed file, but then its checksum is right.
    if _has_right_length(start):
        return ""
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    is_zlib = len(start) > 1 and start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0
    return "zlib" if is_zlib else ""


class ZlibFile(io.RawIOBase):
    """Read a zlib-compressed file from its start to its end; EOFError if it is cut off."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed with this one
        self._inflate = zlib.decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._inflate.eof:
            packed = self._inflate.unconsumed_tail or self._file.read(2**16)
            data = self._inflate.decompress(packed, len(buffer))
            if data:
                buffer[: len(data)] = data
                return len(data)
            if not packed:
                raise EOFError("the file ends too early")
        return 0

    def close(self) -> None:
        self._file.close()
        super().close()


def record_files(path: str) -> list[Path]:
    """Return the TFRecord files of `path`: a file, a folder searched recursively, or a pattern with * and ?.

    Raises:
        DataError: there are none, or a folder of numbered shards lacks some.
    """
    if glob.has_magic(path) and not Path(path).expanduser().exists():
        for base in ("", os.environ.get(DATA_VARIABLE, "")):
            names = glob.glob(os.path.join(base, os.path.expanduser(path)), recursive=True)
            files = sorted(Path(name) for name in names if os.path.isfile(name))
            if files:
                return files
        raise DataError(f"No file matches {path!r}, here or in the folder {DATA_VARIABLE}. See --data-args path.")
    found = find_data(path)
    if not found.is_dir():
        return [found]
    files = sorted(file for file in files_below(found) if _is_record_file(file))
    if not files:
        raise DataError(f"{found} holds no TFRecord files (*.tfrecord, or names such as train-00000-of-00008).")
    _refuse_missing_shards(files)
    return files


def _is_record_file(file: Path) -> bool:
    """Return whether a file is named like a TFRecord file; photo-1-of-3.png is not."""
    name = file.name.lower()
    return bool(_IS_RECORD_FILE.search(name)) and not name.startswith(".") and not is_image(name) and file.is_file()


def _refuse_missing_shards(files: Sequence[Path]) -> None:
    """Refuse a folder of `NAME-00000-of-00008` … that lacks some of its files."""
    shards = [(file.parent / part[1], int(part[2])) for file in files if (part := _SHARD.match(file.name))]
    for (series, expected), mine in itertools.groupby(shards):
        count = sum(1 for _ in mine)
        if count < expected:
            raise DataError(
                f"{series.parent} holds {count} of {expected} files {series.name}-*-of-*: some are missing. Name those "
                "to read by a pattern, as in path 'DIR/train-*'."
            )
