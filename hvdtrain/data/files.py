"""Files of samples: where they are looked up, how they are unpacked into the cache, and their reading by byte range."""

import bz2
import gzip
import hashlib
import lzma
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from hvdtrain.config.errors import DataError

if TYPE_CHECKING:  # the command line finds files before TensorFlow starts
    import tensorflow as tf

DATA_VARIABLE = "HVDTRAIN_DATA"
CACHE_VARIABLE = "HVDTRAIN_CACHE"
KEPT_OPEN = 256
"""Files that a `Blobs` keeps open; others are opened for each read. Most machines allow a process 1024."""
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
Identity = tuple[int, int]


def find_data(path: str) -> Path:
    """Return the file or folder `path`, looked up in the folder HVDTRAIN_DATA if it does not exist.

    Raises:
        DataError: it exists in neither place, or a folder cannot be read.
    """
    if not path:
        raise DataError("This data source needs a file or folder: --data-args path PATH.")
    here = Path(path).expanduser()
    if is_there(here):
        return here
    folder = os.environ.get(DATA_VARIABLE)
    if folder and not here.is_absolute() and is_there(Path(folder) / here):
        return Path(folder) / here
    looked = f", nor is it in {DATA_VARIABLE} ({folder})" if folder else f" ({DATA_VARIABLE} names no folder either)"
    raise DataError(f"There is no {here.absolute()}{'' if here.is_absolute() else looked}. See --data-args path.")


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists.

    Raises:
        DataError: a folder on the way to it cannot be read.
    """
    try:
        return path.exists()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None


def files_below(folder: Path, above: frozenset[Identity] = frozenset()) -> Iterator[Path]:
    """Yield the files below `folder`, sorted by name, without hidden ones.

    Links are followed, except to a folder of `above`, which is listed already.

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


def cache_folder() -> Path:
    """Create and return the cache folder: HVDTRAIN_CACHE, or hvdtrain in the user's cache."""
    chosen = os.environ.get(CACHE_VARIABLE)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(chosen) if chosen else Path(base) / "hvdtrain"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"The cache {folder} cannot be made: {error.strerror}. Set {CACHE_VARIABLE}.") from None
    return folder


def cache_key(path: Path, *what: str) -> str:
    """Return the cache's name for something derived from a file, by the file's size and modification time."""
    facts = path.stat()
    text = "\0".join([str(path.resolve()), str(facts.st_size), str(facts.st_mtime_ns), *what])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@contextmanager
def made_once(target: Path) -> Iterator[Path | None]:
    """Yield a draft path to the one process that makes `target`; None to all others, once it exists.

    The draft is renamed to `target` if the block succeeds, and removed if it fails.

    Raises:
        DataError: the folder of `target` is not writable.
    """
    with writing_into(target.parent):
        claim = FileLock(target.with_name(f"{target.name}.lock")).acquire()
    with claim:
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


def seekable(path: Path, opener: Opener | None = None) -> Path:
    """Return an uncompressed copy of `path`, or `path` itself if it is not compressed.

    The first process of a host unpacks it into the cache while the others wait; later runs find it there.

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


def _unpack(path: Path, opener: Opener, draft: Path) -> None:
    try:
        with opener(path) as packed, open(draft, "wb") as plain:
            shutil.copyfileobj(packed, plain, 2**20)
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} is damaged and cannot be unpacked: {error}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be unpacked into {draft.parent}: {error.strerror or error}.") from None


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

    def read(self, number: int) -> bytes:
        """Return the bytes of blob `number`.

        Raises:
            DataError: the file cannot be read, or is too short.
        """
        number = int(number)
        length = int(self.lengths[number])
        try:
            data = self._pread(int(self.file_of[number]), length, int(self.offsets[number]))
        except OSError as error:
            raise DataError(f"{self.describe(number)}: {error.strerror}") from None
        if len(data) != length:
            raise DataError(f"{self.describe(number)}: the file ends {length - len(data)} bytes too early")
        if self._check is not None:
            self._check(data, number)
        return data

    def tensor(self, numbers: "tf.Tensor") -> "tf.Tensor":
        """Return the blobs `numbers` [n] as strings [n]; usable within tf.data.Dataset.map."""
        import tensorflow as tf

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

    def listing(self) -> list[str]:
        """Return the name that all hosts share and the size of each blob; empty if they have no such names."""
        names = self._known_as or []
        return [f"{name} ({size:,} bytes)" for name, size in zip(names, self.lengths, strict=False)]

    def version(self) -> bytes:
        """Return a hash of the paths and modification times, which differ between hosts."""
        facts = [f"{file.resolve()} {file.stat().st_mtime_ns}" for file in self.files]
        return hashlib.sha256("\n".join(facts).encode()).digest()

    def _read_all(self, numbers: np.ndarray) -> np.ndarray:
        pieces = np.empty(len(numbers), object)
        for place, number in enumerate(numbers):
            pieces[place] = self.read(number)
        return pieces

    def _pread(self, file: int, length: int, offset: int) -> bytes:
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
