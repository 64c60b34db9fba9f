"""CIFAR-10 and CIFAR-100 in their published formats: a folder, or the .tar.gz of it.

    data_batch_1.bin … data_batch_5.bin, test_batch.bin    CIFAR-10, binary version
    data_batch_1 … data_batch_5, test_batch                CIFAR-10, Python version (pickled)
    train.bin, test.bin                                    CIFAR-100, binary version
    train, test                                            CIFAR-100, Python version (pickled)

The files may be in the folder or in a subfolder. Without test files, training samples are held out.
CIFAR-100 has 100 fine and 20 coarse labels.
"""

import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.files.tar_members import members
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.data.sources.decoding import to_unit
from hvdtrain.data.sources.held_out import array_parts, check_range
from hvdtrain.data.sources.numpy_pickle import read_pickle
from hvdtrain.data.splits import DataSplits

SIDE, CHANNELS = 32, 3
PIXELS = SIDE * SIDE * CHANNELS
CLASSES = {"CIFAR-10": {"fine": 10}, "CIFAR-100": {"fine": 100, "coarse": 20}}
MOST_MEMBERS = 20
"""CIFAR's archives have fewer members: a search for its files stops here."""
Part = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Layout:
    """One of the published formats."""

    data_set: str
    train: tuple[str, ...]
    test: str
    read: Callable[[bytes, str, str, str], Part]
    """Parses a file, given its bytes and name, the data set and the kind of labels."""


def load(*, path: str = "", labels: str = "fine", validation: int = 0) -> DataSplits:
    """Load images [32, 32, 3] in [0, 1] and their labels.

    Args:
        path: the folder or tar file.
        labels: `fine` or `coarse`; CIFAR-10 has fine ones only.
        validation: images to hold out for validation if there is no test file; 0: one in ten.

    Raises:
        ConfigError: unknown kind of labels.
        DataError: files are missing or damaged.
    """
    place = find_data(path)
    files = dict(_in_folder(place) if place.is_dir() else _in_tar(place))
    layout = _layout(place, files)
    if labels not in CLASSES[layout.data_set]:
        known = " and ".join(CLASSES[layout.data_set])
        raise ConfigError(f"{layout.data_set} has {known} labels. Received: labels={labels!r}.")

    def part(names: tuple[str, ...]) -> Part:
        return _joined([layout.read(files[name], f"{place}, {name}", layout.data_set, labels) for name in names])

    held_out = part((layout.test,)) if layout.test in files else None
    parts = array_parts(part(layout.train), held_out, validation=validation, name=str(place))
    classes = CLASSES[layout.data_set][labels]
    return DataSplits(
        parts[0],
        parts[1],
        (SIDE, SIDE, CHANNELS),
        classes,
        finish=to_unit,
        preprocessing=Preprocessing(_class_names(place, files, labels, classes), ImageInputs(SIDE, SIDE, CHANNELS)),
        held_out=held_out is None,
    )


def _class_names(place: Path, files: dict[str, bytes], labels: str, classes: int) -> tuple[str, ...] | None:
    """Return the names of the classes in the files' list of them; None without one."""
    for name in (f"{labels}_label_names.txt", "batches.meta.txt"):
        if name in files:
            found = files[name].decode("utf-8", "replace").split()
            return tuple(found) if len(found) == classes else None
    for name, key in (("meta", f"{labels}_label_names"), ("batches.meta", "label_names")):
        content = read_pickle(files[name], f"{place}, {name}") if name in files else None
        values = {_text(k): v for k, v in content.items()} if isinstance(content, dict) else {}
        if isinstance(values.get(key), list) and len(values[key]) == classes:
            return tuple(map(_text, values[key]))
    return None


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _from_binary(data: bytes, where: str, data_set: str, labels: str) -> Part:
    """Parse records of one byte for each kind of label, followed by the pixels."""
    kinds = list(reversed(CLASSES[data_set]))  # the coarse label comes first
    record = len(kinds) + PIXELS
    if not data or len(data) % record:
        raise DataError(f"{where} holds {len(data)} bytes: that is no whole number of records of {record}.")
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    return _checked(rows[:, len(kinds) :], rows[:, kinds.index(labels)], where, CLASSES[data_set][labels])


def _from_pickle(data: bytes, where: str, data_set: str, labels: str) -> Part:
    """Parse a pickled dict with `data`, pixels [samples, 3072], and lists of labels."""
    key = b"labels" if data_set == "CIFAR-10" else f"{labels}_labels".encode()
    content = read_pickle(data, where)
    if not isinstance(content, dict):
        raise DataError(f"{where} must hold a dict. Received: {_described(content)}.")
    # Pickled again by Python 3, the keys may be str.
    content = {name.encode() if isinstance(name, str) else name: value for name, value in content.items()}
    missing = [name.decode() for name in (b"data", key) if name not in content]
    if missing:
        raise DataError(f"{where} has no {missing[0]!r}.")
    images, numbers = content[b"data"], _array(content[key])
    if not isinstance(images, np.ndarray) or images.dtype != np.uint8 or images.shape[1:] != (PIXELS,):
        raise DataError(f"{where}: 'data' must be bytes [samples, {PIXELS}]. Received: {_described(images)}.")
    if not len(images):
        raise DataError(f"{where} holds no images.")
    if numbers.shape != images.shape[:1] or not np.issubdtype(numbers.dtype, np.integer):
        raise DataError(
            f"{where}: {key.decode()!r} must be one whole number for each of {len(images)} images. "
            f"Received: {_described(numbers)}."
        )
    return _checked(images, numbers, where, CLASSES[data_set][labels])


def _checked(images: np.ndarray, labels: np.ndarray, where: str, classes: int) -> Part:
    """Return images [samples, 32, 32, 3] from colour planes [samples, 3072], and labels checked for range."""
    check_range(labels, classes, lambda number: f"{where}, record {number}")
    return images.reshape(-1, CHANNELS, SIDE, SIDE).transpose(0, 2, 3, 1), labels.astype(np.int32)


def _array(values: Any) -> np.ndarray:
    try:
        return np.asarray(values)
    except ValueError:  # lists of unequal lengths
        return np.empty(0)


def _joined(parts: list[Part]) -> Part:
    images, labels = zip(*parts, strict=True)
    return np.concatenate(images), np.concatenate(labels)


BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
LAYOUTS = (
    Layout("CIFAR-10", tuple(f"{name}.bin" for name in BATCHES), "test_batch.bin", _from_binary),
    Layout("CIFAR-10", BATCHES, "test_batch", _from_pickle),
    Layout("CIFAR-100", ("train.bin",), "test.bin", _from_binary),
    Layout("CIFAR-100", ("train",), "test", _from_pickle),
)
NAMES = {name for layout in LAYOUTS for name in (*layout.train, layout.test)}
LISTS = {"batches.meta.txt", "batches.meta", "fine_label_names.txt", "coarse_label_names.txt", "meta"}
"""Files with the names of the classes."""


def _layout(place: Path, files: dict[str, bytes]) -> Layout:
    found = [layout for layout in LAYOUTS if any(name in files for name in layout.train)]
    if not found:
        raise DataError(
            f"{place} holds none of CIFAR's files: data_batch_1.bin … (binary), data_batch_1 … (Python), or train.bin "
            "or train (CIFAR-100). See --data-args path."
        )
    if len(found) > 1:
        raise DataError(
            f"{place} holds both {found[0].train[0]} and {found[1].train[0]}: name the folder of one of them."
        )
    missing = [name for name in found[0].train if name not in files]
    if missing:
        raise DataError(f"{place} holds no {missing[0]}, and needs {', '.join(found[0].train)}.")
    return found[0]


def is_cifar(path: Path) -> bool:
    """Whether a folder or tar file has files with CIFAR's names; CIFAR-100's are called as folders of others are.

    Raises:
        DataError: it cannot be read, or is not a tar file.
    """
    if path.is_dir():
        return any(file.name in NAMES for file in _files_in(path))
    with _opened(path) as archive:
        return any(_name(member) in NAMES and member.isreg() for member in islice(archive, MOST_MEMBERS))


def _files_in(folder: Path) -> Iterator[Path]:
    files = sorted([*folder.glob("*"), *folder.glob("*/*")])
    return (file for file in files if file.name in NAMES | LISTS and file.is_file())


def _in_folder(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in _files_in(folder):
        try:
            yield file.name, file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}.") from None


def _in_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    with _opened(path) as archive:
        for member in members(archive, path):
            if _name(member) in NAMES | LISTS and member.isreg():
                content: Any = archive.extractfile(member)
                yield _name(member), content.read()


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path) as archive:
            yield archive
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is no tar file, or damaged: {error}.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None


def _name(member: tarfile.TarInfo) -> str:
    return PurePosixPath(member.name).name


def _described(thing: Any) -> str:
    return f"{thing.dtype} {list(thing.shape)}" if isinstance(thing, np.ndarray) else type(thing).__name__
