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
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from hvdtrain.config.errors import DataError
from hvdtrain.config.registry import optional_package
from hvdtrain.data.blobs import Blobs
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
_HEADER = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
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


class Records(Blobs):
    """The records of several files, each a tf.train.Example, verified by checksum when read.

    Indices and uncompressed copies of files are cached.

    Args:
        files: the files, compressed or not.

    Raises:
        ConfigError: a missing package.
        DataError: a damaged file, or no records at all.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        optional_package("google_crc32c", "tfrecord", "--data tfrecord")
        with ThreadPoolExecutor(INDEXED_AT_ONCE) as pool:
            plain, indexes = zip(*pool.map(_indexed, files), strict=True)
        counts = [len(index.offsets) for index in indexes]
        index = Index(*(np.concatenate(parts) for parts in zip(*indexes, strict=True)))
        file_of = np.repeat(np.arange(len(files)), counts)
        super().__init__(plain, file_of, index.offsets, index.lengths, check=self._verify)
        self.folder = files[0].parent
        self.name_feature: str | None = None
        """The feature that holds a record's name in messages."""
        self._checksums = index.checksums
        self._firsts = np.cumsum([0, *counts])
        common = os.path.commonpath([file.absolute().parent for file in files])
        self._titles = [str(file.absolute().relative_to(common)) for file in files]

    def describe(self, number: int) -> str:
        """Return file, record (from 0) and the name that the record holds."""
        file = int(self.file_of[number])
        place = f"{self._titles[file]}, record {int(number) - self._firsts[file]}"
        name = self._name_of(int(number)) if self.name_feature else ""
        return f"{place} ({name})" if name else place

    def entries(self, number: int) -> Any:
        """Return the features of a record by name, also of a damaged one; {} if it is not a tf.train.Example."""
        return _entries_of(self.read(number, checked=False)) or {}

    def is_whole(self, number: int) -> bool:
        """Return whether a record matches its checksum."""
        return masked_checksum(self.read(number, checked=False)) == int(self._checksums[number])

    def held(self, number: int) -> str:
        """Describe the features of a record."""
        entries = self.entries(number)
        kinds = {key: entries[key].WhichOneof("kind") or "nothing" for key in sorted(entries)}
        listed = ", ".join(f"{key} ({kind.removesuffix('_list')})" for key, kind in kinds.items())
        return f"holds {listed}" if listed else "is not a tf.train.Example, or is an empty one"

    def fingerprint(self) -> bytes:
        """Return a hash [32 bytes] of the records' checksums and lengths, and thus of their contents."""
        return hashlib.sha256(self.lengths.tobytes() + self._checksums.tobytes()).digest()

    def _verify(self, data: bytes, number: int) -> None:
        if masked_checksum(data) != int(self._checksums[number]):
            raise DataError(f"{self.describe(number)}: the record is damaged (its checksum is wrong)")
        # TensorFlow would put the bytes into its message, which Python fails to decode.
        if _entries_of(data) is None:
            raise DataError(f"{self.describe(number)}: it is not a tf.train.Example")

    def _name_of(self, number: int) -> str:
        try:
            entries = _entries_of(self._bytes(number)) or {}
            return str(entries[self.name_feature].bytes_list.value[0].decode()) if self.name_feature in entries else ""
        except (OSError, IndexError, UnicodeDecodeError):
            return ""  # lost to damage


def _entries_of(data: bytes) -> Any:
    try:
        return tf.train.Example.FromString(data).features.feature
    except DecodeError:
        return None


def _indexed(file: Path) -> tuple[Path, Index]:
    """Return an uncompressed copy of a file, or the file itself, and its index."""
    try:
        packed = compression(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    openers: dict[str, Any] = {"gzip": gzip.open, "zlib": _open_zlib}
    plain = seekable(file, openers[packed]) if packed else file
    target = cache_folder() / f"{cache_key(plain, 'tfrecord index')}.npz"
    with made_once(target) as draft:
        if draft is not None:
            index = read_index(plain, str(file))
            with writing_into(target.parent), open(draft, "wb") as out:
                np.savez(out, **index._asdict())
    with np.load(target) as arrays:
        return plain, Index(**arrays)


def _open_zlib(path: Path) -> IO[bytes]:
    return io.BytesIO(zlib.decompress(path.read_bytes()))


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
            header, begin = file.read(_HEADER.size), place + _HEADER.size
            if begin <= size and not _has_right_length(header):
                raise DataError(
                    f"{name}, record {number}: its length is damaged, or this is not a TFRecord file (the checksum is "
                    "wrong)."
                )
            length = _HEADER.unpack(header)[0] if begin <= size else 0
            place = begin + length + _CHECKSUM.size
            if place > size:
                raise DataError(f"{name}, record {number}: the file ends {place - size} bytes too early.")
            file.seek(begin + length)
            yield begin, length, _CHECKSUM.unpack(file.read(_CHECKSUM.size))[0]


def masked_checksum(data: bytes) -> int:
    """Return the CRC-32C of `data`, masked as TFRecord does, since data may themselves hold checksums."""
    import google_crc32c

    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _has_right_length(header: bytes) -> bool:
    return len(header) == _HEADER.size and _HEADER.unpack(header)[1] == masked_checksum(header[:8])


def compression(path: Path) -> str:
    """Return "gzip" or "zlib" for a compressed TFRecord file, else ""."""
    with open(path, "rb") as file:
        start = file.read(_HEADER.size)
    # A length may look like the magic number of a compressed file, but then its checksum is right.
    if _has_right_length(start):
        return ""
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    is_zlib = len(start) > 1 and start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0
    return "zlib" if is_zlib else ""


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
    # Not photo-1-of-3.png.
    named = (file for file in files_below(found) if _IS_RECORD_FILE.search(file.name) and not is_image(file.name))
    files = sorted(file for file in named if file.is_file())
    if not files:
        raise DataError(f"{found} holds no TFRecord files (*.tfrecord, or names such as train-00000-of-00008).")
    shards = [(file.parent / part[1], int(part[2])) for file in files if (part := _SHARD.match(file.name))]
    for (series, expected), mine in itertools.groupby(shards):
        count = len(list(mine))
        if count < expected:
            raise DataError(
                f"{series.parent} holds {count} of {expected} files {series.name}-*-of-*: some are missing. Name those "
                "to read by a pattern, as in path 'DIR/train-*'."
            )
    return files
