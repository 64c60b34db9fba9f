"""Facts about the machine; reading them starts no process and takes milliseconds."""

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil

GIB = 2**30
MIB = 2**20

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Machine:
    """What this process may use of its machine."""

    system: str
    """Name of the operating system."""
    kernel: str
    libc: str
    cpu: str
    """Model of the processor."""
    cores: int
    """Logical cores of the machine."""
    usable_cores: int
    """Cores in this process's affinity mask."""
    cpu_quota: float | None
    """Cores' worth of time that its control group may use; None where there is no limit."""
    memory: int
    """Bytes in the machine, or in the control group's limit where that is less."""
    available_memory: int
    """Bytes that can still be used."""
    shm: int | None
    """Bytes of /dev/shm; None where there is none."""
    shm_free: int | None


def read_machine() -> Machine:
    """Return what is known about this machine."""
    memory, available = _memory()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return Machine(
        system=_system(),
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()).strip() or "unknown",
        cpu=_cpu_model(Path("/proc/cpuinfo")),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        memory=memory,
        available_memory=available,
        shm=shm.total if shm else None,
        shm_free=shm.free if shm else None,
    )


def cpu_quota(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> float | None:
    """Return the cores' worth of time this process's control groups allow, the tightest one; None for no limit."""
    quotas = [_quota(folder) for folder in _groups(root, membership)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    """Return the folders of this process's control group and of those around it, for versions 2 and 1."""
    match = re.search(r"^0::/(.*)$", _text(membership), flags=re.MULTILINE)
    inner = root / match[1] if match else root
    return [root / "cpu", inner, *(folder for folder in inner.parents if folder.is_relative_to(root))]


def _quota(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_text(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period"))
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _memory() -> tuple[int, int]:
    """Return total and available bytes, within the control groups' limits where a container or a job sets them."""
    machine = psutil.virtual_memory()
    limits = memory_limits()
    total = min([machine.total, *(limit for limit, _ in limits)])
    return total, min([machine.available, *(limit - used for limit, used in limits)])


def memory_limits(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> list[tuple[int, int]]:
    """Return the limit and the use in bytes of each of this process's control groups (version 2) that has one."""
    texts = [
        [_text(folder / f"memory.{name}").strip() for name in ("max", "current")]
        for folder in _groups(root, membership)
    ]
    return [(int(limit), int(used)) for limit, used in texts if limit.isdigit() and used.isdigit()]


def _system() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


def _cpu_model(cpuinfo: Path) -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text(cpuinfo), flags=re.MULTILINE)
    return match[1] if match else platform.machine()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
