"""Writes one shard of a packed folder, in a worker process. Imports no TensorFlow, which takes seconds."""

import os
import signal
import threading
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO

import google_crc32c
import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.tfrecord_file import FOOTER_BYTES, HEADER_BYTES, Index, framed, masked_checksum

IMAGE, LABEL, NAME = "image/encoded", "image/class/label", "image/filename"
"""Feature names of a record: those of ImageNet's TFRecords."""
WORK_FOLDER = ".packing"
"""Folder within the packed one for the working files of packing."""
_CHUNK = 2**20
_VARINT, _BYTES = 0, 2
"""Wire types of protobuf."""


@dataclass(frozen=True, kw_only=True)
class ShardJob:
    """A shard to make: byte ranges of files, with a name and a label for each."""

    folder: Path
    """The packed folder."""
    file: str
    """The shard's file name."""
    split: str
    sources: list[Path]
    source_of: np.ndarray
    """[records] indices into `sources`."""
    offsets: np.ndarray
    lengths: np.ndarray
    names: list[str]
    labels: np.ndarray

    @property
    def path(self) -> Path:
        """Path of the finished shard."""
        return self.folder / self.file

    @property
    def draft(self) -> Path:
        """Path while it is being written."""
        return self.folder / WORK_FOLDER / f"{self.file}.draft"

    @property
    def entry(self) -> Path:
        """Path of its index entry."""
        return self.folder / WORK_FOLDER / f"{self.file}.npz"


@dataclass(frozen=True)
class ShardEntry:
    """The index entry of a shard."""

    bytes: int
    crc32c: int
    index: Index

    def is_whole(self, path: Path) -> bool:
        """Whether the file `path` is intact, by its size and CRC-32C."""
        return path.is_file() and path.stat().st_size == self.bytes and file_crc32c(path) == self.crc32c

    def save(self, path: Path) -> None:
        """Write it atomically."""
        draft = path.with_name(f"{path.name}.draft")
        with open(draft, "wb") as file:
            np.savez(file, bytes=self.bytes, crc32c=self.crc32c, **self.index._asdict())
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> "ShardEntry | None":
        """Read it; None if it is missing or damaged."""
        try:
            with np.load(path) as arrays:
                index = Index(*(arrays[name] for name in Index._fields))
                return cls(int(arrays["bytes"]), int(arrays["crc32c"]), index)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return None


def start_worker() -> None:
    """Make this process end with its parent, however that ends, and at once on Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait([sentinel]), os._exit(1)), daemon=True).start()


def make_shard(job: ShardJob) -> ShardEntry:
    """Make a shard unless an intact one exists, and return its index entry.

    Raises:
        DataError: an image cannot be read, or the disk is full.
    """
    kept = ShardEntry.load(job.entry)
    if kept is not None and kept.is_whole(job.path):
        return kept
    try:
        entry = _write(job)
        entry.save(job.entry)
        os.replace(job.draft, job.path)
    except OSError as error:
        raise DataError(f"{job.path} cannot be written: {error.strerror}.") from None
    return entry


def _write(job: ShardJob) -> ShardEntry:
    place, crc, records = 0, 0, []
    with open(job.draft, "wb") as file:
        for name, label, image in zip(job.names, job.labels.tolist(), _pieces(job), strict=True):
            example = encoded_example({IMAGE: image, LABEL: label, NAME: os.fsencode(name)})
            record = framed(example)
            file.write(record)
            crc = google_crc32c.extend(crc, record)
            records.append((place + HEADER_BYTES, len(example), masked_checksum(example)))
            place += HEADER_BYTES + len(example) + FOOTER_BYTES
        file.flush()
        os.fsync(file.fileno())
    return ShardEntry(place, crc, Index.of(records))


def _pieces(job: ShardJob) -> Iterator[bytes]:
    """Yield the byte ranges in order; a file with several in a row is opened once."""
    opened: IO[bytes] | None = None
    current = -1
    try:
        for number, (source, name) in enumerate(zip(job.source_of.tolist(), job.names, strict=True)):
            if source != current:
                if opened is not None:
                    opened.close()
                opened, current = _open(job.sources[source], name), source
            assert opened is not None
            yield _piece(opened, int(job.offsets[number]), int(job.lengths[number]), name)
    finally:
        if opened is not None:
            opened.close()


def _open(source: Path, name: str) -> IO[bytes]:
    try:
        return open(source, "rb", buffering=0)
    except OSError as error:
        raise DataError(f"{name} ({source}) cannot be read: {error.strerror}.") from None


def _piece(file: IO[bytes], offset: int, length: int, name: str) -> bytes:
    try:
        data = os.pread(file.fileno(), length, offset)
    except OSError as error:
        raise DataError(f"{name} ({file.name}) cannot be read: {error.strerror}.") from None
    if len(data) != length:
        raise DataError(f"{name} ({file.name}) became shorter while it was packed.")
    return data


def file_crc32c(path: Path) -> int:
    """Return the CRC-32C of a whole file."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = google_crc32c.extend(crc, chunk)
    return crc


def encoded_example(entries: Mapping[str, bytes | int]) -> bytes:
    """Return a tf.train.Example with one value per feature, in protobuf's wire format.

    Example.features, Features.feature, BytesList.value and Int64List.value are field 1 each; a map is a repeated
    message of key (1) and value (2); of a Feature, bytes_list is field 1 and int64_list field 3.
    """
    return _field(
        1, b"".join(_field(1, _field(1, key.encode()) + _field(2, _feature(entries[key]))) for key in entries)
    )


def _feature(value: bytes | int) -> bytes:
    if isinstance(value, bytes):
        return _field(1, _field(1, value))
    return _field(3, _varint(1 << 3 | _VARINT) + _varint(value & 0xFFFFFFFFFFFFFFFF))


def _field(number: int, data: bytes) -> bytes:
    return b"".join((_varint(number << 3 | _BYTES), _varint(len(data)), data))


def _varint(value: int) -> bytes:
    """Encode `value` in groups of 7 bits, lowest first; all but the last have their high bit set."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    groups.append(value)
    return bytes(groups)
