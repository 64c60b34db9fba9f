"""Commit checkpoints: whole, under their own names, before any older one goes."""

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint import index
from hvdtrain.checkpoint.index import Index, StoredTensor
from hvdtrain.checkpoint.naming import REPLACED, step_named


def commit(
    draft: Path, final: Path, tensors: Mapping[str, StoredTensor], files: Mapping[str, int], scalars: Mapping[str, Any]
) -> None:
    """Write the index of `draft`, in which every rank's file is, and give the folder its name."""
    file = draft / index.NAME
    content = Index(scalars=scalars, files=files, tensors=tensors, saved_at=time.time(), step=step_named(final))
    file.write_text(index.encode(content), encoding="utf-8")
    _sync(file)
    _sync(draft)
    _show(draft, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    """Force a file's or a folder's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _show(draft: Path, final: Path) -> None:
    """Rename `draft`; a checkpoint of the same step stays complete, under another name, until then."""
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        if replaced.exists():
            discard(replaced)
        os.rename(final, replaced)
    try:
        os.rename(draft, final)
    except OSError:
        if replaced.exists():
            os.rename(replaced, final)
        raise
    if replaced.exists():
        with contextlib.suppress(OSError):
            discard(replaced)


def discard(path: Path) -> None:
    """Remove a checkpoint; hidden first, so that no part of one is ever taken for the whole."""
    hidden = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    os.rename(path, hidden)
    shutil.rmtree(hidden, ignore_errors=True)
