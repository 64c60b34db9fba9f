"""Inspection of TFRecord files: every record is checked and parsed, and the images in it are decoded."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.features import FILE_NAME, Description, read_description
from hvdtrain.data.files.packed_folder import PackedFolder, read_packed, size_of
from hvdtrain.data.files.tfrecord_file import Index, walk
from hvdtrain.data.files.tfrecord_index import Records, short_names, uncompressed
from hvdtrain.data.packing.inspection_report import Examined, Report, Tick, decoded_image, in_threads
from hvdtrain.data.packing.shard_writer import LABEL, NAME, file_crc32c

IMAGE_STARTS = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"BM")
"""First bytes of JPEG, PNG, GIF and BMP files."""
USUAL_LABELS = (LABEL, "label")
"""Names of label features if there is no description."""


class _Examiner:
    """Examines records one by one, using their description and index if there are any."""

    def __init__(self, records: Records, description: Description | None, packed: PackedFolder | None = None) -> None:
        self._records = records
        self._description = description
        self._packed = packed
        targets = description.targets if description else None
        self._targets = (targets,) if isinstance(targets, str) else USUAL_LABELS
        self._name = (description.name if description else None) or NAME

    def examine(self, number: int) -> Examined:
        """Return the contents of record `number`, and its damage."""
        examined = Examined(self._records.place(number))
        try:
            data = self._records.read(number)
        except DataError as error:
            examined.problems.append(str(error).rstrip("."))
            return examined
        try:
            entries = tf.train.Example.FromString(data).features.feature
            examined.place += self._named(entries)
        except DecodeError:
            entries = None
        if len(data) < self._records.index.lengths[number]:
            examined.problems.append("the file ends within it")
        elif not self._records.is_whole(data, number):
            examined.problems.append("the record is damaged (its checksum is wrong)")
        elif entries is None:
            examined.problems.append("it is no tf.train.Example")
        else:
            self._look(examined, entries, number)
        return examined

    def _named(self, entries: Any) -> str:
        values = entries[self._name].bytes_list.value if self._name in entries else []
        return f" ({values[0].decode(errors='replace')})" if values else ""

    def _look(self, examined: Examined, entries: Any, number: int) -> None:
        used = self._description.used if self._description else {}
        for key in entries:
            is_image = key in used and used[key].kind == "image"
            examined.look(key, partial(_described, entries[key], is_image))
        missing = [key for key in used if key not in entries]
        examined.problems += [f"it has no {key!r}" for key in missing]
        target = next((key for key in self._targets if key in entries), None)
        labels = entries[target].int64_list.value if target else []
        if len(labels) == 1:
            self._count(examined, labels[0], number)

    def _count(self, examined: Examined, label: int, number: int) -> None:
        classes = self._description.classes if self._description else None
        if classes is not None and not 0 <= label < classes:
            examined.problems.append(f"the label {label} is outside of 0 to {classes - 1}")
            return
        examined.label = str(label)
        if self._packed is not None:
            assert self._records.labels is not None, "a packed folder has them"
            examined.label = self._packed.classes[label]
            examined.split = self._packed.shards[int(self._records.file_of[number])].split
            if label != self._records.labels[number]:
                examined.problems.append(f"the label {label} is not the index's, {self._records.labels[number]}")


def inspect_records(path: str, files: Sequence[Path], tick: Tick) -> Report:
    """Read all records of TFRecord files; a description in their folder names the labels."""
    report = Report("TFRecord files", path)
    records = _found(files, report)
    report.facts["records"] = f"{len(records):,} in {len(files)} file{'s' * (len(files) > 1)}"
    report.facts["size"] = f"{sum(file.stat().st_size for file in files):,} bytes"
    report.take(in_threads(_Examiner(records, _beside(records.folder)).examine, range(len(records)), tick))
    return report


def inspect_packed(folder: Path, tick: Tick) -> Report:
    """Read all records of a folder that `data pack` made, and compare its files with the index."""
    packed = read_packed(folder)
    records = packed.records()
    report = Report("packed images", str(folder))
    report.facts["records"] = f"{len(records):,} of {len(packed.classes)} classes in {len(packed.shards)} files"
    report.facts["size"] = f"{sum(shard.bytes for shard in packed.shards):,} bytes"
    sizes = [size_of(folder / shard.file) for shard in packed.shards]
    present = np.array([size is not None for size in sizes])
    numbers = np.flatnonzero(present[records.file_of]).tolist()
    report.take(in_threads(_Examiner(records, _beside(folder), packed).examine, numbers, tick))
    for shard, size in zip(packed.shards, sizes, strict=True):
        if size is None:
            report.damaged.append(f"{shard.file} is missing")
        elif not any(line.startswith(shard.file) for line in report.damaged) and (
            size != shard.bytes or file_crc32c(folder / shard.file) != shard.crc32c
        ):
            report.damaged.append(f"{shard.file}: the file is not the one that was packed (size or checksum)")
    return report


def _found(files: Sequence[Path], report: Report) -> Records:
    """Index the records of all files; of a damaged file, those before the damage."""
    plain, found, file_of = [], [], []
    names = short_names(files)
    for place, file in enumerate(files):
        plain.append(file)
        try:
            plain[place] = uncompressed(file)
            for record in walk(plain[place], names[place]):
                found.append(record)
                file_of.append(place)
        except DataError as error:
            report.damaged.append(f"{str(error).rstrip('.')}; what follows cannot be read")
    return Records(
        folder=files[0].parent, names=names, files=plain, file_of=np.array(file_of, np.int64), index=Index.of(found)
    )


def _beside(folder: Path) -> Description | None:
    file = folder / FILE_NAME
    return read_description(file) if file.is_file() else None


def _described(entry: Any, is_image: bool) -> str:
    kind = entry.WhichOneof("kind")
    if kind is None:
        return "nothing"
    values = getattr(entry, kind).value
    if kind != "bytes_list":
        return f"{kind.removesuffix('_list')} [{len(values)}]"
    if len(values) == 1 and (is_image or values[0].startswith(IMAGE_STARTS)):
        return decoded_image(values[0])
    return f"bytes [{len(values)}]"
