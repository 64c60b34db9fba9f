"""A rank's file of tensors: their bytes one after another, with a checksum for each."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.checkpoint.snapshot import Owned
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import boxes_of

_SHARED = "with sharded tensors the folder of checkpoints must be one that all ranks share."

Entries = list[list[Any]]
"""Of each box that was written: path, dtype, global shape, bounds of the box, file, offset and SHA-256."""


def write_tensors(file: Path, tensors: Iterable[Owned]) -> tuple[Entries, int]:
    """Write `tensors` to a new file, one after another, and force it to disk; return its entries and its size.

    A rank that has nothing to write makes no file.
    """
    entries: Entries = []
    offset = 0
    stream = None
    try:
        for tensor in tensors:
            if stream is None:
                stream = open(file, "xb")  # noqa: SIM115 (opened with the first tensor)
            array, spec = tensor.array(), tensor.spec
            for box, place in boxes_of(spec.slice):
                content = _bytes(np.ascontiguousarray(array[place]))
                stream.write(content)
                bounds = [[part.start, part.stop] for part in box]
                digest = hashlib.sha256(content).hexdigest()
                entries.append([spec.path, spec.dtype, list(spec.global_shape), bounds, file.name, offset, digest])
                offset += len(content)
        if stream is not None:
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        if stream is not None:
            stream.close()
    return entries, offset


def write_list(file: Path, entries: Entries, size: int) -> None:
    """Write the entries and the size of `file` beside it, where the primary finds them."""
    _list_of(file).write_text(json.dumps([entries, size]), encoding="utf-8")


def take_list(file: Path) -> tuple[Entries, int]:
    """Return the entries and the size of `file`, and remove their list: the manifest will hold them.

    Raises:
        CheckpointError: another rank wrote `file`, which is not here.
    """
    try:
        entries, size = json.loads(_list_of(file).read_text(encoding="utf-8"))
        _list_of(file).unlink()
        if file.stat().st_size == size:
            return entries, size
    except FileNotFoundError:
        pass
    raise CheckpointError(f"{file.name} was written by another rank and is not in {file.parent.parent}: {_SHARED}")


def refuse_unshared(draft: Path) -> None:
    """Refuse a folder of checkpoints of which this rank does not see `draft`, which the primary has made in it.

    Raises:
        CheckpointError: naming the folder.
    """
    if not draft.is_dir():
        raise CheckpointError(f"What rank 0 writes to {draft.parent} is not seen here: {_SHARED}")


def _list_of(file: Path) -> Path:
    return file.with_suffix(".json")


def _bytes(array: np.ndarray) -> Any:
    """Return the array's own memory as bytes, whatever its dtype."""
    return array.reshape(-1).view(np.uint8).data


def sync(path: Path) -> None:
    """Force a file's or a folder's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
