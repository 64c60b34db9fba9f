"""MNIST's file format, idx: a folder with a file of images and a file of labels for each split.

    train-images-idx3-ubyte    train-labels-idx1-ubyte
    t10k-images-idx3-ubyte     t10k-labels-idx1-ubyte     also test-…; without them, training samples are held out

Each may be compressed (….gz), and may be spelled train-images.idx3-ubyte. Fashion-MNIST, KMNIST and EMNIST have the
same format; EMNIST's names have a prefix, such as emnist-letters-.
"""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.data.source import input_shape
from hvdtrain.data.sources.decoding import to_unit
from hvdtrain.data.sources.held_out import array_parts, check_range
from hvdtrain.data.splits import DataSplits

TRAINING = ("train",)
VALIDATION = ("t10k", "test")
UBYTE = 0x08
"""Code of unsigned bytes, in the third byte of a file."""


def load(*, path: str = "", prefix: str = "", validation: int = 0, classes: int = 0) -> DataSplits:
    """Load images [height, width, 1] in [0, 1] and their labels.

    Args:
        path: the folder with the files.
        prefix: common prefix of the file names.
        validation: images to hold out if there are no test files; 0: one in ten.
        classes: number of classes; 0: one more than the highest label.

    Raises:
        DataError: a file is missing or damaged, or images and labels do not match.
    """
    folder = find_data(path)
    if not folder.is_dir():
        raise DataError(f"{folder} is a file: --data-args path takes the folder with train-images-idx3-ubyte.")
    train = _part(folder, prefix, TRAINING, classes)
    if train is None:
        raise DataError(f"{folder} holds no {prefix}train-images-idx3-ubyte, nor with .gz. See --data-args path.")
    held_out = _part(folder, prefix, VALIDATION, classes)
    labels = [part[1] for part in (train, held_out) if part is not None]
    parts = array_parts(train, held_out, validation=validation, name=str(folder))
    known = classes or 1 + max(int(array.max()) for array in labels)
    shape = input_shape(parts[0])
    return DataSplits(
        parts[0],
        parts[1],
        shape,
        known,
        finish=to_unit,
        preprocessing=Preprocessing(image=ImageInputs(*shape)),
        held_out=held_out is None,
    )


def read_idx(file: Path, dims: int) -> np.ndarray:
    """Read the bytes [count, …] of an idx file, which may be compressed.

    Args:
        file: the file.
        dims: required number of dims.

    Raises:
        DataError: it cannot be read, is not an idx file, or its length does not match its header.
    """
    data = _bytes(file)
    if len(data) < 4 or data[:2] != b"\0\0":
        raise DataError(f"{file} is no idx file: it begins with {data[:4].hex(' ') or 'nothing'}.")
    if data[2] != UBYTE or data[3] != dims:
        raise DataError(
            f"{file} must be an idx file of unsigned bytes with {dims} dims (00 00 08 {dims:02x}). "
            f"It begins with {data[:4].hex(' ')}."
        )
    begin = 4 + 4 * dims
    shape = tuple(int.from_bytes(data[place : place + 4], "big") for place in range(4, min(begin, len(data)), 4))
    promised = begin + math.prod(shape)
    if len(shape) < dims or len(data) != promised:
        raise DataError(f"{file} holds {len(data)} bytes; its header promises {promised} for {list(shape)}.")
    return np.frombuffer(data, np.uint8, offset=begin).reshape(shape)


def _bytes(file: Path) -> bytes:
    try:
        if file.suffix != ".gz":
            return file.read_bytes()
        with gzip.open(file) as unpacked:
            return unpacked.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is damaged: {error}.") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None


def _part(folder: Path, prefix: str, names: tuple[str, ...], classes: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Return images [count, height, width, 1] and labels [count] int32; None if there are no images."""
    for name in names:
        images_file = _find(folder, f"{prefix}{name}-images", "idx3-ubyte")
        if images_file is None:
            continue
        labels_file = _find(folder, f"{prefix}{name}-labels", "idx1-ubyte")
        if labels_file is None:
            raise DataError(f"{folder} holds {images_file.name}, but no {prefix}{name}-labels-idx1-ubyte.")
        images, labels = read_idx(images_file, 3), _labels(labels_file, classes)
        if len(images) != len(labels):
            raise DataError(f"{images_file} holds {len(images)} images; {labels_file} holds {len(labels)} labels.")
        if not len(images):
            raise DataError(f"{images_file} holds no images.")
        return images[..., np.newaxis], labels
    return None


def _labels(file: Path, classes: int) -> np.ndarray:
    labels = read_idx(file, 1).astype(np.int32)
    if classes:
        check_range(labels, classes, lambda number: f"{file}, label {number}")
    return labels


def _find(folder: Path, name: str, kind: str) -> Path | None:
    spelt = [folder / f"{name}{join}{kind}{packed}" for packed in ("", ".gz") for join in ("-", ".")]
    return next((file for file in spelt if file.exists()), None)
