"""Inspection of files and folders of data: contents and damage. Everything is read, images are decoded."""

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.class_folders import is_image, is_tar, scan
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.files.packed_folder import is_packed
from hvdtrain.data.files.tfrecord_file import begins_with_a_record
from hvdtrain.data.files.tfrecord_index import is_record_file, record_files
from hvdtrain.data.files.walking import files_below
from hvdtrain.data.packing.inspection_arrays import inspect_cifar, inspect_idx, inspect_npy_files, inspect_npz, is_idx
from hvdtrain.data.packing.inspection_records import inspect_packed, inspect_records
from hvdtrain.data.packing.inspection_report import Examined, Report, Tick, decoded_image, in_threads
from hvdtrain.data.packing.inspection_text import DELIMITERS, inspect_table, inspect_texts
from hvdtrain.data.sources import cifar_archives


def inspect(path: str, tick: Tick | None = None) -> Report:
    """Inspect a packed folder, TFRecord files, class folders, arrays, a table or text.

    Args:
        path: a file or folder, also below HVDTRAIN_DATA.
        tick: called now and then with the numbers of records done and in all.

    Raises:
        DataError: `path` does not exist, cannot be read, or is none of these.
    """
    try:
        return _inspected(path, tick or (lambda done, total: None))
    except OSError as error:
        raise DataError(f"{error.filename or path} cannot be read: {error.strerror}.") from None


def _inspected(path: str, tick: Tick) -> Report:
    if any(mark in path for mark in "*?"):
        return inspect_records(path, record_files(path), tick)
    found = find_data(path)
    if found.is_dir():
        return _inspect_folder(found, tick)
    if is_tar(found):
        return inspect_cifar(found) if cifar_archives.is_cifar(found) else _inspect_images(found, tick)
    if found.suffix == ".npz":
        return inspect_npz(found)
    if found.suffix.lower() in DELIMITERS:
        return inspect_table(found)
    if is_record_file(found) or begins_with_a_record(found):
        return inspect_records(str(found), [found], tick)
    return inspect_texts(found, [found])


def _inspect_folder(folder: Path, tick: Tick) -> Report:
    if is_packed(folder):
        return inspect_packed(folder, tick)
    if is_idx(folder):
        return inspect_idx(folder)
    if cifar_archives.is_cifar(folder):
        return inspect_cifar(folder)
    files = list(files_below(folder))
    if any(is_record_file(file) for file in files):
        return inspect_records(str(folder), record_files(str(folder)), tick)
    if any(is_image(file.name) for file in files):
        return _inspect_images(folder, tick)
    return _inspect_others(folder, files)


def _inspect_others(folder: Path, files: Sequence[Path]) -> Report:
    if any(folder.glob("*.npy")):
        return inspect_npy_files(folder)
    texts = [file for file in files if file.suffix == ".txt"]
    if texts:
        return inspect_texts(folder, texts)
    raise DataError(
        f"{folder} holds no images in class folders, nor TFRecord files, .npy files, text (*.txt), or MNIST's or "
        "CIFAR's files."
    )


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
