"""The TFRecord file format: a sequence of records, each with four fields.

    length       8 bytes, little-endian: how many bytes of data follow
    checksum     4 bytes: masked CRC-32C of the length
    data         as many bytes as the length says
    checksum     4 bytes: masked CRC-32C of the data

Nothing here needs TensorFlow. See https://www.tensorflow.org/tutorials/load_data/tfrecord.
"""

import gzip
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import google_crc32c
import numpy as np

from hvdtrain.config.errors import DataError

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _LENGTH.size + _CHECKSUM.size
FOOTER_BYTES = _CHECKSUM.size


class Index(NamedTuple):
    """Offsets, lengths and masked checksums of the records of a file."""

    offsets: np.ndarray
    """[records] int64, bytes."""
    lengths: np.ndarray
    """[records] int64, bytes."""
    checksums: np.ndarray
    """[records] uint32."""

    @classmethod
    def of(cls, records: list[tuple[int, int, int]]) -> "Index":
        """Make an index of the (offset, length, checksum) of each record."""
        table = np.array(records, np.int64).reshape(-1, 3)
        return cls(table[:, 0].copy(), table[:, 1].copy(), table[:, 2].astype(np.uint32))


def masked_checksum(data: bytes) -> int:
    """Return the CRC-32C of `data`, masked as TFRecord does, since data may themselves hold checksums."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def framed(data: bytes) -> bytes:
    """Return `data` framed as a record."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, _CHECKSUM.pack(masked_checksum(length)), data, _CHECKSUM.pack(masked_checksum(data))))


def walk(path: Path, name: str = "") -> Iterator[tuple[int, int, int]]:
    """Yield offset, length and masked checksum of each record, without reading its data.

    Args:
        path: the file, uncompressed.
        name: its name in messages; its path by default.

    Raises:
        DataError: a damaged length, or a file that ends within a record; the file and the record are named.
    """
    size, place, number = path.stat().st_size, 0, 0
    with open(path, "rb") as file:
        while place < size:
            where = f"{name or path}, record {number}"
            begin, length = place + HEADER_BYTES, _length(file, where)
            place = begin + length + FOOTER_BYTES
            if place > size:
                raise DataError(f"{where}: the file ends {place - size} bytes too early.")
            file.seek(begin + length)
            yield begin, length, _CHECKSUM.unpack(file.read(FOOTER_BYTES))[0]
            number += 1


def read_index(path: Path, name: str = "") -> Index:
    """Return the index of a file; see `walk`."""
    return Index.of(list(walk(path, name)))


def compression(path: Path) -> str:
    """Return "gzip" or "zlib" for a compressed TFRecord file, else ""."""
    start = _start(path)
    # A length may look like the magic number of a compressed file, but then its checksum is right.
    if _has_right_length(start):
        return ""
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    is_zlib = len(start) > 1 and start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0
    return "zlib" if is_zlib else ""


def begins_with_a_record(path: Path) -> bool:
    """Whether a file starts with an uncompressed TFRecord header."""
    packed = compression(path)
    if not packed:
        return _has_right_length(_start(path))
    try:
        with OPENERS[packed](path) as file:
            return _has_right_length(file.read(HEADER_BYTES))
    except (EOFError, OSError, zlib.error):
        return False


def _length(file: BinaryIO, where: str) -> int:
    header = file.read(HEADER_BYTES)
    if len(header) < HEADER_BYTES:
        raise DataError(f"{where}: the file ends {HEADER_BYTES - len(header)} bytes too early.")
    if not _has_right_length(header):
        raise DataError(f"{where}: its length is damaged, or this is no TFRecord file (the checksum is wrong).")
    return int(_LENGTH.unpack(header[: _LENGTH.size])[0])


def _has_right_length(header: bytes) -> bool:
    length, checksum = header[: _LENGTH.size], header[_LENGTH.size : HEADER_BYTES]
    return len(header) >= HEADER_BYTES and checksum == _CHECKSUM.pack(masked_checksum(length))


def _start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(HEADER_BYTES)


class ZlibFile(io.RawIOBase):
    """Reads a zlib-compressed file.

    Raises:
        EOFError: while reading, if the file is cut off.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115 - closed with this one
        self._inflate = zlib.decompressobj()

    def readable(self) -> bool:
        """See `io.RawIOBase`."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See `io.RawIOBase`."""
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
        """See `io.RawIOBase`."""
        self._file.close()
        super().close()


OPENERS: dict[str, Any] = {"gzip": gzip.open, "zlib": ZlibFile}
"""Opens a file of each compression."""
