"""glibc's memory allocator: keep what is freed in the process.

By its own settings glibc returns freed memory to the system as soon as the top of an arena, or a mapped block, is free.
A training step frees its activations and allocates the same sizes again in the next step; the kernel then has to map
and clear every page anew.
"""

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.config.runtime import MallocName

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
"""Parameters of `mallopt`, from glibc's malloc.h; they hold for all arenas and threads from the next call on."""

HEAP = 64 * 2**20
"""The size of the heaps that all arenas but the main one consist of, and so the largest block that these can hold."""

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
TUNABLES = (
    "glibc.malloc.trim_threshold",
    "glibc.malloc.top_pad",
    "glibc.malloc.mmap_threshold",
    "glibc.malloc.mmap_max",
)
"""Settings of the environment that decide what glibc keeps."""


def choose_malloc(choice: MallocName, environ: Mapping[str, str] = os.environ) -> str:
    """Have glibc keep freed memory in the process, or leave it alone; return what holds, in a line.

    Another allocator than glibc's, and one that the user has set up by environment variables, are left alone.

    Args:
        choice: value of `--malloc`.
        environ: variables that the process was started with.
    """
    setting = own_setting(environ)
    if setting is not None:
        return f"glibc, as {setting} has it"
    libc = ctypes.CDLL(None)  # the symbols as every library sees them, a preloaded allocator's included
    other = _other_allocator(libc)
    if other is not None:
        return f"{other} in place of glibc, at its own settings"
    if choice == "system":
        return "glibc at its own settings"
    # Never shrink the end of an arena: as a size_t, -1 is larger than any free block.
    libc.mallopt(TRIM_THRESHOLD, -1)
    # Never unmap a heap: that happens, whatever the trim threshold, where more than this is left in the one before it.
    libc.mallopt(TOP_PAD, HEAP)
    # Map blocks one by one only where no heap can hold them; glibc before 2.35 takes half of that at most.
    if not libc.mallopt(MMAP_THRESHOLD, HEAP):
        libc.mallopt(MMAP_THRESHOLD, HEAP // 2)
    return "glibc, which keeps freed memory"


def own_setting(environ: Mapping[str, str]) -> str | None:
    """Return the user's setting of what glibc keeps, as `NAME=value`; None if there is none."""
    for name in VARIABLES:
        if environ.get(name):
            return f"{name}={environ[name]}"
    for setting in environ.get("GLIBC_TUNABLES", "").split(":"):
        if setting.partition("=")[0] in TUNABLES:
            return f"GLIBC_TUNABLES={setting}"
    return None


def _other_allocator(libc: ctypes.CDLL) -> str | None:
    """Return the library that `malloc` is from if that is not glibc."""
    if not hasattr(libc, "gnu_get_libc_version"):
        return "another C library"
    found = (ctypes.c_void_p * 4)()  # `Dl_info` of dladdr(3), whose first field is the name of the file
    if not libc.dladdr(ctypes.cast(libc.malloc, ctypes.c_void_p), found):
        return "an unknown library"
    file = Path(os.fsdecode(ctypes.string_at(found[0] or b""))).name
    # An executable that is not position-independent has stubs of its own for glibc's functions.
    return file if file.startswith("lib") and not file.startswith("libc.") else None
