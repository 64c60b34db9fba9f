"""A lock on the folder that a job writes to: a second job is refused."""

import contextlib
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.agreement import Ranks, on_every_rank
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.file_lock import is_named, open_locked

NAME = ".lock"


class FolderLock:
    """A job's lock on its folder, which is made if it is missing.

    The lock is a file in the folder, and gone with it: whoever makes the folder again must `renew` it.

    Args:
        folder: of the run, or of its checkpoints.
        job: see `locked`.
    """

    def __init__(self, folder: Path, job: str | None = None) -> None:
        self._file = folder / NAME
        self._job = job
        self._descriptor: int | None = None
        # A forked child shares the open file: it would hold the lock beyond the end of this process.
        os.register_at_fork(after_in_child=partial(_let_go, weakref.ref(self)))

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: another job holds it.
            OSError: the folder cannot be written.
        """
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = _locked(self._file, self._job, takes_over=True)

    def renew(self) -> None:
        """Take the lock again if its folder was removed meanwhile, or is another one; nothing where none was taken.

        Raises:
            CheckpointError: another job holds it by now.
            OSError: the folder cannot be written.
        """
        before = self._descriptor
        if before is not None and not is_named(before, self._file):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # Who took it over from this rank, which was silent, keeps it.
            self._descriptor = _locked(self._file, self._job, takes_over=False)
            os.close(before)

    def release(self) -> None:
        """Let go of it, and remove its file, but not that of another job."""
        if self._descriptor is not None:
            if is_named(self._descriptor, self._file):
                with contextlib.suppress(OSError):
                    self._file.unlink()
            self.let_go()

    def let_go(self) -> None:
        """Close the file of the lock, which stays where it is."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _let_go(reference: "weakref.ref[FolderLock]") -> None:
    lock = reference()
    if lock is not None:
        lock.let_go()


@contextlib.contextmanager
def locked(
    folder: Path, ranks: Ranks, refusal: str = "Checkpoints cannot be written to {folder}", *, job: str | None = None
) -> Iterator[FolderLock]:
    """Hold the lock on `folder` in this context, on the primary; every rank calls it.

    The system lets go of it when the process ends, however it does. Where the file system has no locks there is none.

    Args:
        folder: of the run, or of its checkpoints.
        ranks: of the job.
        refusal: what is said where the folder cannot be made.
        job: name of an elastic job: a rank of it that is lost takes the lock with it, if its host is gone or it is
            stopped. The job's next primary puts a new lock in its place.

    Raises:
        CheckpointError: another job holds it, or the folder cannot be written; the same on every rank.
    """
    made: list[Path] = []
    lock = FolderLock(folder, job)

    def acquire() -> None:
        if ranks.primary:
            try:
                made.extend(path for path in (folder, *folder.parents) if not path.exists())
                lock.acquire()
            except OSError as error:
                raise CheckpointError(f"{refusal.format(folder=folder)}: {error}") from error

    try:
        on_every_rank(ranks, acquire)
        yield lock
    finally:
        lock.release()
        with contextlib.suppress(OSError):  # something is in it
            for path in made:
                path.rmdir()


def _locked(file: Path, job: str | None, *, takes_over: bool) -> int:
    """Return the open lock file, once it is locked."""
    while True:
        try:
            descriptor = open_locked(file)
            break
        except BlockingIOError:
            holder = _holder(file)
        if holder is None:
            continue
        if not takes_over or job is None or holder.get("job") != job:
            raise CheckpointError(
                f"One job at a time writes to a folder. Received: {file.parent}, to which {_named(holder)} still "
                "writes. Wait for it, or name another folder."
            )
        file.unlink(missing_ok=True)
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    holder = {"process": os.getpid(), "host": socket.gethostname(), "since": since, "job": job}
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps(holder).encode())
    return descriptor


def _holder(file: Path) -> dict[str, Any] | None:
    """Return the contents of a lock file, empty if they cannot be read; None if its holder has just removed it."""
    try:
        known = json.loads(file.read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}


def _named(holder: Mapping[str, Any]) -> str:
    if {"process", "host", "since"} <= holder.keys():
        return f"process {holder['process']} on {holder['host']}, since {holder['since']},"
    return "another job"
