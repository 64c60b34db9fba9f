"""A checkpoint that is being written: a hidden folder, locked by its writer, that becomes `step-N` or goes away."""

import contextlib
import json
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tensorflow as tf
from filelock import FileLock

from hvdtrain.checkpoint.commit import commit
from hvdtrain.checkpoint.index import merged
from hvdtrain.checkpoint.naming import PREFIX, name_of
from hvdtrain.checkpoint.selection import Retention, remove_old
from hvdtrain.checkpoint.tensor_files import Owned, write_tensors
from hvdtrain.config.errors import CheckpointError, LaunchError
from hvdtrain.runtime.consequences import reason

_LOCK = ".lock"
"""Ends the name of the file beside a hidden folder that its writer locks: NFS locks no folders."""
_SHARED = "with sharded tensors the folder of checkpoints must be one that all ranks share."


@dataclass(kw_only=True)
class PendingCheckpoint:
    """A checkpoint that is being written, as one rank sees it."""

    final: Path
    """Its folder, once it is committed."""
    rank: int
    scalars: Mapping[str, Any] = field(default_factory=dict)
    retention: Retention = field(default_factory=Retention)
    path: Path = Path()
    """The hidden folder that all ranks write into."""
    owned: Sequence[Owned] = ()
    """The slices that this rank writes."""
    _lock: FileLock | None = None

    @property
    def token(self) -> str:
        """Name of this attempt to write the checkpoint, the same on all ranks."""
        return self.path.name

    @property
    def primary(self) -> bool:
        """Whether this rank has made the folder, and commits the checkpoint."""
        return self._lock is not None

    def create(self) -> None:
        """Make the hidden folder, which nobody else removes while this process holds its lock.

        Raises:
            OSError: it cannot be made.
        """
        folder = self.final.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f".{self.final.name}.{uuid.uuid4().hex[:8]}"
        self._lock = _lock_of(self.path)
        with contextlib.suppress(OSError):  # a file system without locks
            self._lock.acquire(timeout=0)
        try:
            self.path.mkdir()
        except OSError:
            self._release()
            raise

    def refuse_unshared(self) -> None:
        """Refuse a folder of checkpoints in which this rank does not see what the primary has made.

        Raises:
            CheckpointError: naming the folder.
        """
        if not self.path.is_dir():
            raise CheckpointError(f"What rank 0 writes to {self.path.parent} is not seen here: {_SHARED}")

    def write(self) -> str | None:
        """Write this rank's slices to its file and return the name of that; None if it owns nothing."""
        if not self.owned:
            return None
        file = self.path / f"tensors-{self.rank:05d}.safetensors"
        entries = write_tensors(file, self.owned)
        self.owned = ()
        _list_of(file).write_text(json.dumps([entries, file.stat().st_size]), encoding="utf-8")
        return file.name

    def commit(self, written: Sequence[str | None]) -> None:
        """Give the checkpoint its name, and remove those that are not kept; on the primary.

        Args:
            written: what `write` returned on each rank.

        Raises:
            CheckpointError: a file is not there, or slices are missing.
        """
        assert self.primary, "the primary commits"
        lists = {name: _take_list(self.path / name) for name in written if name is not None}
        commit(
            self.path,
            final=self.final,
            tensors=merged([entries for entries, _ in lists.values()]),
            files={name: size for name, (_, size) in lists.items()},
            scalars=self.scalars,
        )
        self._release()
        best, folder = self.scalars.get("best"), self.final.parent
        remove_old(folder, {self.final} | ({folder / name_of(best["step"])} if best else set()), self.retention)
        clear_leavings(folder)

    def give_up(self) -> None:
        """Remove what was written."""
        if self.primary:
            shutil.rmtree(self.path, ignore_errors=True)
            self._release()

    @contextlib.contextmanager
    def naming_failures(self) -> Iterator[None]:
        """Raise what fails in this context as a CheckpointError that names the checkpoint."""
        try:
            yield
        except (OSError, CheckpointError, LaunchError, tf.errors.OpError) as error:
            raise CheckpointError(f"The checkpoint {self.final} cannot be written: {reason(error)}") from error

    def _release(self) -> None:
        if self._lock is not None:
            with contextlib.suppress(OSError):
                Path(self._lock.lock_file).unlink()
            self._lock.release()
            self._lock = None


def clear_leavings(folder: Path) -> None:
    """Remove the hidden folders of killed writers, but none that another process may be writing or removing."""
    for name in {path.name.removesuffix(_LOCK) for path in folder.glob(f".{PREFIX}*")}:
        with contextlib.suppress(OSError), _lock_of(folder / name).acquire(timeout=0):
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / (name + _LOCK)).unlink()


def _lock_of(hidden: Path) -> FileLock:
    """Return the lock on a hidden folder, which the thread that writes it releases."""
    return FileLock(hidden.with_name(hidden.name + _LOCK), thread_local=False, fallback_to_soft=False)


def _list_of(file: Path) -> Path:
    """Return where a rank leaves the index of its file for the primary."""
    return file.with_suffix(".json")


def _take_list(file: Path) -> tuple[list[list[Any]], int]:
    try:
        entries, size = json.loads(_list_of(file).read_text(encoding="utf-8"))
        _list_of(file).unlink()
        if file.stat().st_size == size:
            return entries, size
    except FileNotFoundError:
        pass
    raise CheckpointError(f"{file.name} was written by another rank and is not in {file.parent.parent}: {_SHARED}")
