"""The format of a folder that `data pack` made: shards of records, and their index.

    train-00000-of-00008.tfrecord, …     the shards; also validation-… and test-…
    features.yaml                        description of the records, for the loader; see `features`
    packing.json                         the options of packing: a rerun with others is refused
    index.json                           shards with their splits, records, bytes and CRC-32C; classes and their counts
    index.npz                            of all records, shard by shard: offsets, lengths, checksums, labels

The index is written last: a folder without one is incomplete.
"""

import dataclasses
import json
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.files.locations import is_there
from hvdtrain.data.files.tfrecord_file import Index
from hvdtrain.data.files.tfrecord_index import Records

PLAN = "packing.json"
INDEX = "index.json"
ARRAYS = "index.npz"


@dataclass(frozen=True)
class Shard:
    """One file of a packed folder."""

    file: str
    split: str
    """`train`, `validation` or `test`."""
    records: int
    bytes: int
    crc32c: int
    """CRC-32C of the whole file."""


@dataclass(frozen=True, kw_only=True)
class PackedFolder:
    """A packed folder, as its index describes it."""

    path: Path
    classes: list[str]
    shards: list[Shard]
    index: Index
    """Index of the records of all shards, in order."""
    labels: np.ndarray
    """[records] int32, indices into `classes`."""

    @property
    def splits(self) -> list[str]:
        """The splits of the folder."""
        return list(dict.fromkeys(shard.split for shard in self.shards))

    def records(self, split: str | None = None) -> Records:
        """Return the records of one split, or of all."""
        shards = [shard for shard in self.shards if split in (None, shard.split)]
        mine = np.repeat([split in (None, shard.split) for shard in self.shards], self._counts)
        return Records(
            folder=self.path,
            names=[shard.file for shard in shards],
            files=[self.path / shard.file for shard in shards],
            file_of=np.repeat(np.arange(len(shards)), [shard.records for shard in shards]),
            index=Index(*(part[mine] for part in self.index)),
            labels=self.labels[mine],
        )

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of records of each class, by split."""
        return {
            split: dict(zip(self.classes, np.bincount(labels, minlength=len(self.classes)).tolist(), strict=True))
            for split in self.splits
            if (labels := self.records(split).labels) is not None
        }

    def bounds(self) -> list[slice]:
        """Return the range of records in each shard."""
        ends = np.cumsum(self._counts).tolist()
        return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    @property
    def _counts(self) -> list[int]:
        return [shard.records for shard in self.shards]


def is_packed(folder: Path) -> bool:
    """Whether `data pack` made or began the folder."""
    return is_there(folder / PLAN)


def read_packed(folder: Path) -> PackedFolder:
    """Read the index of a packed folder, not its shards.

    Raises:
        DataError: packing is incomplete, or the index is damaged or unreadable.
    """
    if not is_there(folder / INDEX):
        raise DataError(f"{folder}: packing was not finished: run data pack again.")
    try:
        values = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        shards = [Shard(**shard) for shard in values["shards"]]
        _refuse_elsewhere(shards)
        with np.load(folder / ARRAYS) as arrays:
            index = Index(arrays["offsets"], arrays["lengths"], arrays["checksums"])
            packed = PackedFolder(
                path=folder, classes=values["classes"], shards=shards, index=index, labels=arrays["labels"]
            )
        if any(len(part) != sum(shard.records for shard in shards) for part in (*index, packed.labels)):
            raise ValueError(f"{ARRAYS} and {INDEX} differ in the number of records")
    except PermissionError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from None
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(
            f"The index of {folder} is damaged ({error}): remove {INDEX} and run data pack again."
        ) from None
    return packed


def _refuse_elsewhere(shards: Sequence[Shard]) -> None:
    """Refuse an index by which files outside of its folder would be read."""
    for shard in shards:
        if Path(shard.file).name != shard.file:
            raise ValueError(f"the shard {shard.file!r} is no file in it")


def refuse_changed(packed: PackedFolder) -> None:
    """Refuse a folder with shards of other sizes than in the index; their bytes are not read.

    Raises:
        DataError: names the first such shard.
    """
    for shard in packed.shards:
        size = size_of(packed.path / shard.file)
        if size != shard.bytes:
            what = "is missing" if size is None else f"has {size} bytes instead of {shard.bytes}"
            raise DataError(f"{packed.path / shard.file} {what}: run data pack again, which makes that shard anew.")


def size_of(file: Path) -> int | None:
    """Return the size of a file in bytes; None if it does not exist."""
    return file.stat().st_size if file.is_file() else None


def write_index(packed: PackedFolder) -> None:
    """Write the index of a packed folder atomically."""
    values = {
        "classes": packed.classes,
        "records": packed.counts(),
        "shards": [dataclasses.asdict(shard) for shard in packed.shards],
    }
    draft = packed.path / f".{ARRAYS}.draft"
    with open(draft, "wb") as file:
        np.savez(file, **packed.index._asdict(), labels=packed.labels)
    os.replace(draft, packed.path / ARRAYS)
    write_json(packed.path / INDEX, values)


def write_json(file: Path, values: dict[str, Any]) -> None:
    """Write `values` as JSON, atomically."""
    draft = file.with_name(f".{file.name}.draft")
    draft.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(draft, file)
