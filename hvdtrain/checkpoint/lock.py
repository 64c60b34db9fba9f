"""The lock on the folder that a job writes to: a second job is refused."""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from hvdtrain.checkpoint.agreement import on_primary
from hvdtrain.config.errors import CheckpointError

if TYPE_CHECKING:
    from hvdtrain.backends.protocol import Backend

NAME = ".lock"
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""


class FolderLock:
    """A job's lock on its folder, which is made if it is missing.

    The lock is a file in the folder, and gone with it: whoever makes the folder again must `renew` it. The system
    releases it when the process ends. On a file system without locks nothing is locked.

    Args:
        folder: of the run, or of its checkpoints.
        job: see `locked`.
    """

    def __init__(self, folder: Path, job: str | None = None) -> None:
        self._file = folder / NAME
        self._job = job
        self._lock: FileLock | None = None
        self._locked_file: os.stat_result | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another job holds it.
            OSError: the folder cannot be written.
        """
        self._acquire(takes_over=True)

    def renew(self) -> None:
        """Take the lock again if its folder was removed or replaced meanwhile; nothing if it was never taken.

        Raises:
            CheckpointError: another job holds it by now.
            OSError: the folder cannot be written.
        """
        before = self._lock
        if before is not None and not self._in_place():
            self._acquire(takes_over=False)  # whoever took over from this rank, which was silent, keeps it
            before.release()

    def release(self) -> None:
        """Release the lock and remove its file, unless it is another job's by now."""
        if self._lock is not None:
            if self._lock.is_locked and self._in_place():  # in a forked child it is not locked
                with contextlib.suppress(OSError):
                    self._file.unlink()
            self._lock.release()
            self._lock = None

    def _acquire(self, *, takes_over: bool) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._file, thread_local=False, on_acquired=self._sign)
        while True:
            try:
                lock.acquire(timeout=0)
            except Timeout:
                self._refuse_holder(takes_over=takes_over)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
            else:
                break
        self._lock = lock

    def _refuse_holder(self, *, takes_over: bool) -> None:
        """Refuse a folder that another job has locked; take the file away from a lost rank of this job."""
        try:
            found = json.loads(self._file.read_text())
        except FileNotFoundError:  # its holder has just removed it
            return
        except ValueError:
            found = {}
        holder = found if isinstance(found, dict) else {}
        if not takes_over or self._job is None or holder.get("job") != self._job:
            raise CheckpointError(
                f"One job at a time writes to a folder. Received: {self._file.parent}, to which {_named(holder)} still "
                "writes. Wait for it, or name another folder."
            ) from None
        self._file.unlink(missing_ok=True)

    def _sign(self, descriptor: int) -> None:
        """Write into the locked file who holds it."""
        self._locked_file = os.fstat(descriptor)
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since, "job": self._job}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(holder).encode(), 0)

    def _in_place(self) -> bool:
        """Return whether the locked file still has its name."""
        try:
            return self._locked_file is not None and os.path.samestat(os.stat(self._file), self._locked_file)
        except OSError:
            return False


@contextlib.contextmanager
def locked(
    folder: Path,
    ranks: "Backend",
    refusal: str = "Checkpoints cannot be written to {folder}",
    *,
    job: str | None = None,
) -> Iterator[FolderLock]:
    """Hold the lock on `folder` in this context, on the primary. Collective.

    Args:
        folder: of the run, or of its checkpoints.
        ranks: of the job.
        refusal: begins the error if the folder cannot be made.
        job: name of an elastic job. A lost rank of it keeps the lock, if its host is gone or it is stopped: the job's
            next primary puts a new lock in its place.

    Raises:
        CheckpointError: another job holds it, or the folder cannot be written; the same on every rank.
    """
    made: list[Path] = []
    lock = FolderLock(folder, job)

    def acquire() -> None:
        try:
            made.extend(path for path in (folder, *folder.parents) if not path.exists())
            lock.acquire()
        except OSError as error:
            why = "it is a file, and no folder." if folder.is_file() else error
            raise CheckpointError(f"{refusal.format(folder=folder)}: {why}") from error

    try:
        on_primary(ranks, acquire)
        yield lock
    finally:
        lock.release()
        with contextlib.suppress(OSError):  # something is in it
            for path in made:
                path.rmdir()


def _named(holder: Mapping[str, Any]) -> str:
    if {"process", "host", "since"} <= holder.keys():
        return f"process {holder['process']} on {holder['host']}, since {holder['since']},"
    return "another job"
