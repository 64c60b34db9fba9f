"""Whether a checkpoint is whole and unchanged: every byte of it is read, and compared with its checksums."""

import hashlib
from pathlib import Path
from typing import BinaryIO

from hvdtrain.checkpoint import manifest
from hvdtrain.checkpoint.manifest import Manifest, StoredSlice, read_manifest, stored_bytes
from hvdtrain.checkpoint.naming import step_named
from hvdtrain.checkpoint.slices import other_bytes
from hvdtrain.config.errors import CheckpointError

_CHUNK = 1 << 22


def verify(path: Path) -> None:
    """Refuse the checkpoint at `path` unless all of it is there, and as it was written.

    Raises:
        CheckpointError: naming what is damaged.
    """
    if manifest.format_of(path) == 1:
        _verify_format_1(path)
        return
    content = read_manifest(path)
    _check_name(path, content)
    slices = [(part, name) for name, tensor in content.tensors.items() for part in tensor.slices]
    sizes = {part: stored_bytes(content.tensors[name], part) for part, name in slices}
    try:
        for file in content.files:
            with open(path / file, "rb") as stream:
                for part, name in slices:
                    if part.file == file and _digest(stream, part, sizes[part]) != part.sha256:
                        raise other_bytes(path, name, part)
    except OSError as error:
        raise manifest.damaged(path, error) from error


def _digest(stream: BinaryIO, part: StoredSlice, size: int) -> str:
    digest = hashlib.sha256()
    stream.seek(part.offset)
    while size > 0:
        chunk = stream.read(min(size, _CHUNK))
        if not chunk:
            break
        digest.update(chunk)
        size -= len(chunk)
    return digest.hexdigest()


def _check_name(path: Path, content: Manifest) -> None:
    """Refuse a checkpoint that took the place of another step's."""
    named = step_named(path)
    if None not in (named, content.step) and named != content.step:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: it is that of step {content.step}, under another's name."
        )


def _verify_format_1(path: Path) -> None:
    from hvdtrain.checkpoint.earlier_format import EarlierReader

    EarlierReader(path, {}).verify()
