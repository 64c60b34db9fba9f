"""Checks of what the machine gives this process: cores, memory, shared memory, and the user's key file."""

import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.runtime.control.signing import key_file
from hvdtrain.runtime.diagnosis.check import Check, failed, ok, warning
from hvdtrain.runtime.diagnosis.machine import GIB, MIB, Machine
from hvdtrain.runtime.malloc import Malloc, own_setting

MIN_SHM = 64 * MIB
"""What containers get by default; MPI's and NCCL's ranks of one machine exchange through it."""

REUSED_MIB = 64
"""Allocated, freed and allocated again, to see whether the process keeps it."""

MIN_MEMORY = 2 * GIB
"""Two ranks of a small model: each took 0.65 GiB once it had imported TensorFlow and reduced a vector."""


def check_cores(machine: Machine, environ: Mapping[str, str] = os.environ) -> Check:
    """Check that the cores this process may run on are cores it may use in full."""
    detail = f"{machine.usable_cores} of {machine.cores} usable"
    if "OMP_NUM_THREADS" in environ:
        detail += f"; OMP_NUM_THREADS={environ['OMP_NUM_THREADS']} (TensorFlow does not read it)"
    if machine.cpu_quota is not None and machine.cpu_quota < machine.usable_cores:
        detail += f"; a control group allows the time of {machine.cpu_quota:.3g}"
        return warning("Cores", detail, f"--threads {max(1, int(machine.cpu_quota))} divided by the ranks")
    return ok("Cores", detail)


def check_memory(machine: Machine) -> Check:
    """Check that two small ranks fit."""
    detail = f"{machine.available_memory / GIB:.1f} of {machine.memory / GIB:.1f} GiB available"
    if machine.available_memory < MIN_MEMORY:
        fix = "end other programs, or raise the container's or job's memory limit"
        return warning("Memory", f"{detail}; a rank takes 0.7 GiB and more", fix)
    return ok("Memory", detail)


def check_malloc(malloc: Malloc, faults: int, environ: Mapping[str, str] = os.environ) -> Check:
    """Check that freed memory is used again without being fetched from the system.

    Args:
        malloc: the allocator.
        faults: page faults of using `REUSED_MIB` again.
        environ: environment variables.
    """
    name, pages = "Allocator", REUSED_MIB * MIB // mmap.PAGESIZE
    detail = f"{malloc.about}; {faults:,} page faults in {pages:,} pages that are used again"
    if faults > pages / 10:
        variable = (own_setting(environ) or "LD_PRELOAD").partition("=")[0]
        return warning(name, f"{detail}: steps on the CPU may be slower", f"unset {variable}, and compare")
    return ok(name, detail)


def check_shm(machine: Machine) -> Check:
    """Check that the ranks of one machine have room to exchange data in."""
    fix = "docker run --shm-size=1g, or: mount -o remount,size=1g /dev/shm"
    if machine.shm is None or machine.shm_free is None:
        return warning("/dev/shm", "not there; the ranks of one machine may not be able to exchange data", fix)
    detail = f"{machine.shm / MIB:,.0f} MiB, {machine.shm_free / MIB:,.0f} free"
    if machine.shm < MIN_SHM:
        return warning("/dev/shm", detail, fix)
    if machine.shm_free < MIN_SHM:
        return warning("/dev/shm", detail, "remove what ended programs left there: ls -l /dev/shm")
    return ok("/dev/shm", detail)


def check_key(path: Path | None = None) -> Check:
    """Check that nobody else can read the key that this user's jobs are signed with."""
    path = key_file() if path is None else path
    try:
        status = path.stat()
    except FileNotFoundError:
        return ok("Job key", f"{path} is made when it is first needed")
    except OSError as error:
        return failed("Job key", f"{path}: {error.strerror}", "set HVDTRAIN_JOB_SECRET to a secret of your own")
    if status.st_uid != os.geteuid():
        return failed("Job key", f"{path} belongs to user {status.st_uid}", f"rm {path}")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        return failed("Job key", f"{path} has mode {mode:04o}: others may know it", f"rm {path}")
    return ok("Job key", f"{path}, mode {mode:04o}")
