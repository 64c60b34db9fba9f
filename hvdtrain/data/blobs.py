"""Byte ranges of open files, such as samples within tar and TFRecord files, read from any thread."""

import hashlib
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError

KEPT_OPEN = 256
"""Files that a `Blobs` keeps open; others are opened for each read. Most machines allow a process 1024."""


class Blobs:
    """Byte ranges ("blobs") of files, each given by its file, offset and length in bytes.

    Args:
        files: the files.
        file_of: [blobs] index into `files`.
        offsets: [blobs] first byte of each.
        lengths: [blobs] bytes of each.
        names: returns a blob's name in messages; None: its file and offset.
        check: called with a blob's bytes and its number; raises if they are damaged.
        known_as: [blobs] names that are the same on every host, whatever the folder; None: file and offset.

    Raises:
        DataError: no blobs.
    """

    def __init__(
        self,
        files: Sequence[Path],
        file_of: np.ndarray,
        offsets: np.ndarray,
        lengths: np.ndarray,
        *,
        names: Callable[[int], str] | None = None,
        check: Callable[[bytes, int], None] | None = None,
        known_as: Sequence[str] | None = None,
    ) -> None:
        if not len(lengths):
            raise DataError(f"There is nothing to read in {', '.join(map(str, files[:3])) or 'no files'}.")
        self.files = list(files)
        self.file_of = np.asarray(file_of, np.int64)
        self.offsets = np.asarray(offsets, np.int64)
        self.lengths = np.asarray(lengths, np.int64)
        self._names = names
        self._check = check
        self._known_as = known_as
        self._open: dict[int, int] = {}
        weakref.finalize(self, _close, self._open)

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, number: int, *, checked: bool = True) -> bytes:
        """Return the bytes of blob `number`.

        Raises:
            DataError: the file cannot be read, or is too short; or the blob is damaged, if it is `checked`.
        """
        number = int(number)
        try:
            data = self._bytes(number)
        except OSError as error:
            raise DataError(f"{self.describe(number)}: {error.strerror}") from None
        missing = int(self.lengths[number]) - len(data)
        if missing:
            raise DataError(f"{self.describe(number)}: the file ends {missing} bytes too early")
        if checked and self._check is not None:
            self._check(data, number)
        return data

    def tensor(self, numbers: tf.Tensor) -> tf.Tensor:
        """Return the blobs `numbers` [n] as strings [n]; usable within tf.data.Dataset.map."""
        return tf.ensure_shape(tf.numpy_function(self._read_all, [numbers], tf.string), numbers.shape)

    def describe(self, number: int) -> str:
        """Describe blob `number`: its name, or its file and offset."""
        if self._names is not None:
            return self._names(number)
        return f"{self.files[int(self.file_of[number])]}, byte {int(self.offsets[number])}"

    def fingerprint(self) -> bytes:
        """Return a hash of the names that all hosts share and of the lengths; no bytes are read."""
        known_as, places = self._known_as, [self.lengths]
        if known_as is None:
            known_as, places = [file.name for file in self.files], [self.file_of, self.offsets, self.lengths]
        digest = hashlib.sha256(os.fsencode("\n".join(known_as)))
        for array in places:
            digest.update(array.tobytes())
        return digest.digest()

    def version(self) -> bytes:
        """Return a hash of the paths and modification times, which differ between hosts."""
        facts = [f"{file.resolve()} {file.stat().st_mtime_ns}" for file in self.files]
        return hashlib.sha256("\n".join(facts).encode()).digest()

    def _read_all(self, numbers: np.ndarray) -> np.ndarray:
        pieces = np.empty(len(numbers), object)
        for place, number in enumerate(numbers):
            pieces[place] = self.read(number)
        return pieces

    def _bytes(self, number: int) -> bytes:
        file, length, offset = int(self.file_of[number]), int(self.lengths[number]), int(self.offsets[number])
        if file in self._open:
            return os.pread(self._open[file], length, offset)
        descriptor = os.open(self.files[file], os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(descriptor, length, offset)
        # Two threads may have opened the same file: one of the descriptors is kept.
        if len(self._open) >= KEPT_OPEN or self._open.setdefault(file, descriptor) != descriptor:
            os.close(descriptor)
        return data


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
