"""Folders of checkpoints that are being written: hidden, locked by their writer, and removed when it is gone."""

import contextlib
import os
import shutil
import uuid
from pathlib import Path

from hvdtrain.checkpoint.naming import PREFIX
from hvdtrain.runtime.file_lock import is_named, lock, open_locked

_LOCK = ".lock"
"""Ends the name of the file beside a hidden folder that its writer locks: NFS locks no folders."""


class Draft:
    """A hidden folder that nobody else removes as long as this process holds it.

    Args:
        folder: where the checkpoints are; made if it is missing.
        name: the name that the checkpoint will have.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f".{name}.{uuid.uuid4().hex[:8]}"
        self._lock_file = self.path.with_name(self.path.name + _LOCK)
        self._lock = open_locked(self._lock_file, wait=True)
        try:
            self.path.mkdir()
        except OSError:
            self.close()
            raise

    def give_up(self) -> None:
        """Remove the folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Release the lock; the folder may have been renamed."""
        with contextlib.suppress(OSError):
            self._lock_file.unlink()
        os.close(self._lock)


def clear_leavings(folder: Path) -> None:
    """Remove the hidden folders of killed writers, but none that another process may be writing or removing."""
    for name in {path.name.removesuffix(_LOCK) for path in folder.glob(f".{PREFIX}*")}:
        file = folder / (name + _LOCK)
        with contextlib.suppress(OSError):
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                lock(descriptor)
                if is_named(descriptor, file):
                    shutil.rmtree(folder / name, ignore_errors=True)
                    file.unlink()
            finally:
                os.close(descriptor)
