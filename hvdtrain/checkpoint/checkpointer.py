"""Checkpoints in numbered folders that appear whole or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import CheckpointError

FORMAT = 1
PREFIX = "step-"
MANIFEST = "manifest.json"
TENSORS = "tensors"


class Checkpointer:
    """Writes the training state to `folder/step-N` and keeps the newest ones; used by one rank.

    A checkpoint is written into a hidden folder, synced to disk with a manifest of its files, and renamed:
    a writer that is killed leaves nothing that could be taken for a checkpoint.

    Args:
        folder: where the checkpoints are; created when the first is saved.
        keep: how many of the newest stay.
    """

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self._folder = folder
        self._keep = keep

    def save(self, step: int, variables: Mapping[str, tf.Variable], scalars: Mapping[str, Any]) -> Path:
        """Write the state after `step` steps and return its folder.

        Raises:
            CheckpointError: the disk is full or the folder cannot be written.
        """
        final = self._folder / f"{PREFIX}{step:08d}"
        draft = self._folder / f".{final.name}.{os.getpid()}"
        try:
            shutil.rmtree(draft, ignore_errors=True)  # a killed writer may have had this process's number
            draft.mkdir(parents=True)
            tf.train.Checkpoint(variables=dict(variables)).write(str(draft / TENSORS), _by_this_process())
            _write_manifest(draft, variables, scalars)
            if final.exists():
                self._discard(final)
            os.rename(draft, final)
            _sync(self._folder)
        except (OSError, tf.errors.OpError) as error:
            shutil.rmtree(draft, ignore_errors=True)
            raise CheckpointError(f"The checkpoint {final} cannot be written: {error}") from error
        self._remove_old()
        return final

    def newest(self) -> Path:
        """Return the newest complete checkpoint.

        Raises:
            CheckpointError: there is none.
        """
        complete = self._complete()
        if not complete:
            raise CheckpointError(f"There is no complete checkpoint in {self._folder}.")
        return complete[-1]

    def _complete(self) -> list[Path]:
        numbered = {path.name.removeprefix(PREFIX): path for path in self._folder.glob(f"{PREFIX}*")}
        steps = sorted((number for number in numbered if number.isdecimal()), key=int)
        return [numbered[number] for number in steps if (numbered[number] / MANIFEST).is_file()]

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint; hidden first, so that no part of one is ever taken for the whole."""
        hidden = self._folder / f".{path.name}.discarded"
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _remove_old(self) -> None:
        for path in self._complete()[: -self._keep]:
            with contextlib.suppress(OSError):
                self._discard(path)
        for draft in self._folder.glob(f".{PREFIX}*"):
            shutil.rmtree(draft, ignore_errors=True)


def scalars_of(path: Path) -> dict[str, Any]:
    """Return the scalars of the checkpoint at `path`.

    Raises:
        CheckpointError: it is damaged.
    """
    scalars: dict[str, Any] = _read_manifest(path)["scalars"]
    return scalars


def restore(path: Path, variables: Mapping[str, tf.Variable]) -> dict[str, Any]:
    """Load the checkpoint at `path` into `variables` and return its scalars.

    Raises:
        CheckpointError: it is damaged, or was written for another model or optimizer; the paths are named.
    """
    manifest = _read_manifest(path)
    _check_shapes(path, manifest["tensors"], variables)
    try:
        status = tf.train.Checkpoint(variables=dict(variables)).read(str(path / TENSORS), _by_this_process())
        status.assert_existing_objects_matched()
    except (tf.errors.OpError, AssertionError, ValueError) as error:
        raise CheckpointError(f"The checkpoint {path} is damaged: {error}") from error
    scalars: dict[str, Any] = manifest["scalars"]
    return scalars


def _by_this_process() -> tf.train.CheckpointOptions:
    """Let no other process write or read files: variables may lie on servers, whose disks are not this one's."""
    with tf.device("CPU:0"):
        here = tf.constant(0).device
    return tf.train.CheckpointOptions(experimental_io_device=here)


def _write_manifest(draft: Path, variables: Mapping[str, tf.Variable], scalars: Mapping[str, Any]) -> None:
    files = {file.name: file.stat().st_size for file in sorted(draft.iterdir())}
    tensors = {name: [v.dtype.name, list(v.shape)] for name, v in variables.items()}
    manifest = {"format": FORMAT, "scalars": dict(scalars), "files": files, "tensors": tensors}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for file in draft.iterdir():
        _sync(file)
    _sync(draft)


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(f"The checkpoint {path} has format {manifest['format']}, not {FORMAT}.")
        sizes = {name: (path / name).stat().st_size for name in manifest["files"]}
        _ = manifest["tensors"], manifest["scalars"]
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"The checkpoint {path} is damaged: {type(error).__name__} {error}.") from error
    wrong = [name for name, size in sizes.items() if size != manifest["files"][name]]
    if wrong:
        raise CheckpointError(f"The checkpoint {path} is damaged: {wrong[0]} does not have its recorded size.")
    return manifest


def _check_shapes(path: Path, saved: Mapping[str, Any], variables: Mapping[str, tf.Variable]) -> None:
    current = {name: [v.dtype.name, list(v.shape)] for name, v in variables.items()}
    wrong = [
        f"{name}: saved {saved.get(name, 'nothing')}, needed {current.get(name, 'nothing')}"
        for name in sorted({*saved, *current})
        if saved.get(name) != current.get(name)
    ]
    if wrong:
        more = f" … and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise CheckpointError(
            f"The checkpoint {path} is of another model or optimizer: " + "; ".join(wrong[:3]) + more + "."
        )


def _sync(path: Path) -> None:
    """Force a file's or a folder's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
