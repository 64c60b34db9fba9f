"""Inspection of arrays: NumPy's files, and the published files of MNIST and CIFAR as their loaders read them."""

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.packing.inspection_report import Report
from hvdtrain.data.sources import cifar_archives, idx
from hvdtrain.data.splits import DataSplits

MOST_CLASSES = 1000
"""Integers with more distinct values are not taken for classes."""
_IDX_IMAGES = re.compile(r"(.*?)train-images[-.]idx3-ubyte(\.gz)?")
_DAMAGE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


def inspect_npz(path: Path) -> Report:
    """Read all arrays of an .npz file."""
    report = Report("arrays", str(path))
    try:
        with np.load(path) as arrays:
            for name in arrays.files:
                _examine(report, name, partial(arrays.__getitem__, name))
    except PermissionError:
        raise
    except _DAMAGE as error:
        report.damaged.append(f"{path}: {error}")
    return report


def inspect_npy_files(folder: Path) -> Report:
    """Read all .npy files of a folder."""
    report = Report("arrays", str(folder))
    for file in sorted(folder.glob("*.npy")):
        _examine(report, file.stem, partial(np.load, file))
    return report


def inspect_idx(folder: Path) -> Report:
    """Read files in the format of MNIST."""
    prefixes = [found[1] for file in sorted(folder.iterdir()) if (found := _IDX_IMAGES.fullmatch(file.name))]
    report = Report("idx files, as of MNIST", str(folder))
    for prefix in dict.fromkeys(prefixes):
        _examine_splits(report, prefix.rstrip("-"), partial(idx.load, path=str(folder), prefix=prefix))
    return report


def inspect_cifar(path: Path) -> Report:
    """Read CIFAR's files, in a folder or a tar file."""
    report = Report("CIFAR's files", str(path))
    _examine_splits(report, "", partial(cifar_archives.load, path=str(path)))
    return report


def is_idx(folder: Path) -> bool:
    """Whether a folder has files in the format of MNIST."""
    return any(_IDX_IMAGES.fullmatch(file.name) for file in folder.iterdir())


def _examine(report: Report, name: str, read: Callable[[], Any]) -> None:
    try:
        array = read()
    except PermissionError:
        raise
    except _DAMAGE as error:
        report.damaged.append(f"{name}: {error}")
        return
    report.facts[name] = f"{array.dtype} {list(array.shape)}"
    if not array.size or not np.issubdtype(array.dtype, np.number):
        return
    report.facts[name] += f", from {array.min():.4g} to {array.max():.4g}"
    if np.issubdtype(array.dtype, np.inexact) and array.ndim:
        strange = np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(axis=1))
        report.damaged += [f"{name}, sample {number}: NaN or infinite" for number in strange]
    if np.issubdtype(array.dtype, np.integer) and array.ndim == 1:
        _count(report, array, name)


def _examine_splits(report: Report, name: str, load: Callable[[], DataSplits]) -> None:
    """Report what a loader returns, or why it refuses the files."""
    try:
        splits = load()
    except DataError as error:
        report.damaged.append(str(error).rstrip("."))
        return
    for part, source in (("train", splits.train), ("validation", splits.validation)):
        called = f"{name} {part}".strip()
        inputs, labels = source.gather(tf.range(source.size, dtype=tf.int64))[:2]
        report.facts[called] = f"{source.size:,} images {inputs.dtype.name} {list(inputs.shape[1:])}"
        _count(report, labels.numpy(), called)


def _count(report: Report, labels: np.ndarray, split: str) -> None:
    counts = Counter(labels.tolist())
    for label in sorted(counts) if len(counts) <= MOST_CLASSES else []:
        report.count(str(label), split, counts[label])
