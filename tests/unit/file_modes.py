"""Files that may not be read, also for root, whom modes do not stop."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

VERSION_3 = 0x20080522
OVERRIDE = 1 << 1 | 1 << 2
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""


class _Header(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("process", ctypes.c_int))


class _Sets(ctypes.Structure):
    _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))


@contextlib.contextmanager
def closed(*paths: Path) -> Iterator[None]:
    """Take all rights to files or folders away, and from this thread the right to pass over that."""
    modes = [path.stat().st_mode for path in paths]
    for path in paths:
        path.chmod(0)
    libc, header, sets = ctypes.CDLL(None, use_errno=True), _Header(VERSION_3, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())
    before = sets[0].effective
    sets[0].effective = before & ~OVERRIDE
    assert libc.capset(ctypes.byref(header), sets) == 0, os.strerror(ctypes.get_errno())
    try:
        yield
    finally:
        sets[0].effective = before
        libc.capset(ctypes.byref(header), sets)
        for path, mode in zip(paths, modes, strict=True):
            path.chmod(mode)
