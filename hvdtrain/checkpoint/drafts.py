"""Folders of checkpoints that are being written: hidden, locked by their writer, and cleared away when it is gone."""

import contextlib
import fcntl
import os
import shutil
import uuid
from pathlib import Path

from hvdtrain.checkpoint.naming import PREFIX


class Draft:
    """A hidden folder that nobody clears away as long as this process holds it.

    Args:
        folder: where the checkpoints are; made if it is missing.
        name: the name that the checkpoint will have.
    """

    def __init__(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Under a name that nobody clears away, until it is locked.
        token = uuid.uuid4().hex[:8]
        fresh = folder / f".new-{token}"
        fresh.mkdir()
        self._lock = os.open(fresh, os.O_RDONLY)
        _try_lock(self._lock)
        self.path = folder / f".{name}.{token}"
        try:
            os.rename(fresh, self.path)
        except OSError:
            self.close()
            fresh.rmdir()
            raise

    def give_up(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the folder, whatever its name is by now."""
        os.close(self._lock)


def clear_leavings(folder: Path) -> None:
    """Remove what killed writers left; what somebody may be writing, or removing, stays."""
    for path in folder.glob(f".{PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _try_lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Lock a folder, unless another process holds it or its file system has no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
