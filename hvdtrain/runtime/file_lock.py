"""Exclusive locks on files, of one kind wherever hvdtrain locks one.

These are Linux's open file description locks (`F_OFD_SETLK`): byte-range locks, which NFS passes on to its server and
which can be queried without being taken, and which belong to the open file as those of `flock` do. A POSIX lock
(`lockf`) is lost when the process closes any other descriptor of the file, and holds off no thread of its own process;
`flock` sees no POSIX lock on a local disk, and cannot be queried.

The system releases a lock when the last descriptor of the open file is closed, such as when the process ends. A forked
child has one, too.
"""

import fcntl
import os
import struct
from pathlib import Path

_FLOCK = "hhqqi4x"
"""`struct flock` of Linux on 64 bits: type, whence, start, length, process."""
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def lock(descriptor: int, *, wait: bool = False) -> None:
    """Lock the file that is open for writing as `descriptor`.

    Args:
        descriptor: of the open file.
        wait: wait for whoever holds the lock.

    Raises:
        BlockingIOError: somebody else holds the lock.
        OSError: the file system has no locks.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except PermissionError as error:  # POSIX allows EACCES in place of EAGAIN
        raise BlockingIOError(*error.args) from None


def open_locked(file: Path, *, wait: bool = False) -> int:
    """Open a lock file whose holders remove it, and return its descriptor once it is locked and still has its name.

    Where the file system has no locks, the file is opened without one.

    Args:
        file: created if it is missing.
        wait: wait for whoever holds the lock.

    Raises:
        BlockingIOError: somebody else holds the lock.
        OSError: the file cannot be opened.
    """
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            lock(descriptor, wait=wait)
        except BlockingIOError:
            os.close(descriptor)
            raise
        except OSError:
            return descriptor
        if is_named(descriptor, file):
            return descriptor
        os.close(descriptor)  # its last holder has just removed it


def is_named(descriptor: int, file: Path) -> bool:
    """Return whether the open file still has this name."""
    try:
        return os.path.samestat(os.stat(file), os.fstat(descriptor))
    except OSError:
        return False
