"""What a file or folder of data holds, and what of it is damaged: everything is read, images are decoded."""

import re
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.class_folders import is_tar, scan
from hvdtrain.data.files.packed_folder import is_packed
from hvdtrain.data.files.places import find_data
from hvdtrain.data.files.tfrecord_file import begins_with_a_record
from hvdtrain.data.files.tfrecord_index import is_record_file, record_files
from hvdtrain.data.packing.inspection_records import inspect_packed, inspect_records
from hvdtrain.data.packing.inspection_report import Examined, Report, Tick, decoded_image, in_threads

_NO_UTF8 = re.compile("[\udc80-\udcff]")
"""What Python makes of bytes that are no UTF-8, if it is told to go on."""
MOST_CLASSES = 1000
"""Whole numbers of more different values than that are no classes."""


def inspect(path: str, tick: Tick | None = None) -> Report:
    """Read all of a packed folder, TFRecord files, class folders (or a tar file of them), an .npz file or a text file.

    Args:
        path: what to look at; HVDTRAIN_DATA is searched too.
        tick: called with how much is done and how much there is to do, now and then.

    Raises:
        DataError: nothing is there, or it is none of these.
    """
    tick = tick or (lambda done, total: None)
    if any(mark in path for mark in "*?"):
        return inspect_records(path, record_files(path), tick)
    found = find_data(path)
    if found.is_dir():
        return _inspect_folder(found, tick)
    if is_tar(found):
        return _inspect_images(found, tick)
    if found.suffix == ".npz":
        return _inspect_arrays(found)
    if is_record_file(found) or begins_with_a_record(found):
        return inspect_records(str(found), [found], tick)
    return _inspect_text(found)


def _inspect_folder(folder: Path, tick: Tick) -> Report:
    if is_packed(folder):
        return inspect_packed(folder, tick)
    if any(is_record_file(file) for file in folder.rglob("*")):
        return inspect_records(str(folder), record_files(str(folder)), tick)
    return _inspect_images(folder, tick)


def _inspect_images(path: Path, tick: Tick) -> Report:
    found = scan(path)
    report = Report("images in class folders", str(path))
    report.facts["records"] = f"{len(found.names):,} images of {len(found.classes)} classes"
    report.facts["size"] = f"{int(found.blobs.lengths.sum()):,} bytes"

    def examine(number: int) -> Examined:
        examined = Examined(found.blobs.describe(number))
        examined.look("image", lambda: decoded_image(found.blobs.read(number)))
        return examined

    report.take(in_threads(examine, range(len(found.names)), tick))
    for label, split in zip(found.labels.tolist(), found.splits, strict=True):
        report.count(found.classes[label], str(split))
    return report


def _inspect_arrays(path: Path) -> Report:
    report = Report("arrays", str(path))
    try:
        with np.load(path) as arrays:
            for name in arrays.files:
                _examine_array(report, arrays, name)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        report.damaged.append(f"{path}: {error}")
    return report


def _examine_array(report: Report, arrays: np.lib.npyio.NpzFile, name: str) -> None:
    try:
        array = arrays[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
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
        labels = Counter(array.tolist())
        for label in sorted(labels) if len(labels) <= MOST_CLASSES else []:
            report.count(str(label), name, labels[label])


def _inspect_text(path: Path) -> Report:
    data = path.read_bytes()
    if b"\0" in data:
        raise DataError(
            f"{path} is none of what data inspect knows: a packed folder, TFRecord files, class folders of images, a "
            "tar file of them, an .npz file, or text."
        )
    text = data.decode(errors="surrogateescape")
    lines = text.splitlines()
    report = Report("text", str(path))
    report.facts["size"] = f"{len(data):,} bytes"
    report.facts["characters"] = f"{len(text):,}, {len(set(text)):,} different ones"
    report.facts["lines"] = f"{len(lines):,}"
    strange = (number for number, line in enumerate(lines, 1) if _NO_UTF8.search(line))
    report.damaged += [f"{path}, line {number}: bytes that are no UTF-8" for number in strange]
    return report
