"""Facts about the machine; reading them starts no process and takes milliseconds."""

import contextlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.signing import key_file, read_key
from hvdtrain.runtime.inherited import without_launcher

_NO_PROBLEM = re.compile(r"All log messages before absl|^(\[\S+?>:)?[IW]\d{4} |^-+$")
"""Lines that appear in a run in which all is well."""


Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """Check of `doctor`: subject, finding and remedy."""

    name: str
    status: Status
    detail: str
    """What was found, in a line or a few."""
    fix: str = ""
    """The command or the step that mends it; empty where nothing is to be mended."""


def ok(name: str, detail: str) -> Check:
    """Return a check that found what it should."""
    return Check(name, "ok", detail)


def warning(name: str, detail: str, fix: str) -> Check:
    """Return a check that found something that training can do without."""
    return Check(name, "warning", detail, fix)


def failed(name: str, detail: str, fix: str) -> Check:
    """Return a check that found something that keeps training from running as documented."""
    return Check(name, "failed", detail, fix)


GIB = 2**30
MIB = 2**20

CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Machine:
    """Resources that this process may use of its machine."""

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
    """CPU quota of the cgroup in cores; None if unlimited."""
    memory: int
    """Bytes in the machine, or in the cgroup's limit where that is less."""
    available_memory: int
    """Bytes that can still be used."""
    shm: int | None
    """Bytes of /dev/shm; None where there is none."""
    shm_free: int | None


def read_machine() -> Machine:
    """Return what is known about this machine."""
    system = platform.system()
    with contextlib.suppress(OSError, KeyError):
        system = platform.freedesktop_os_release()["PRETTY_NAME"]
    cpu = re.search(r"^model name\s*:\s*(.+)$", text_of(Path("/proc/cpuinfo")), flags=re.MULTILINE)
    memory, limits = psutil.virtual_memory(), memory_limits()
    shm = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return Machine(
        system=system,
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()).strip() or "unknown",
        cpu=cpu[1] if cpu else platform.machine(),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)),
        cpu_quota=cpu_quota(),
        memory=min([memory.total, *(limit for limit, _ in limits)]),
        available_memory=min([memory.available, *(limit - used for limit, used in limits)]),
        shm=shm.total if shm else None,
        shm_free=shm.free if shm else None,
    )


def cpu_quota(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> float | None:
    """Return the CPU quota in cores of this process's cgroups, the tightest one; None if unlimited."""
    quotas = []
    for folder in _groups(root, membership):
        quota, _, period = text_of(folder / "cpu.max").strip().partition(" ")
        if not quota:
            quota, period = (text_of(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period"))
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(root: Path, membership: Path) -> list[Path]:
    """Return the folders of this process's control group and of those around it, for versions 2 and 1."""
    match = re.search(r"^0::/(.*)$", text_of(membership), flags=re.MULTILINE)
    inner = root / match[1] if match else root
    return [root / "cpu", inner, *(folder for folder in inner.parents if folder.is_relative_to(root))]


def memory_limits(root: Path = CGROUP_ROOT, membership: Path = CGROUP_MEMBERSHIP) -> list[tuple[int, int]]:
    """Return the limit and the use in bytes of each of this process's control groups (version 2) that has one."""
    texts = [
        [text_of(folder / f"memory.{name}").strip() for name in ("max", "current")]
        for folder in _groups(root, membership)
    ]
    return [(int(limit), int(used)) for limit, used in texts if limit.isdigit() and used.isdigit()]


def text_of(path: Path) -> str:
    """Return what the system writes in a file; "" where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


MIN_SHM = 64 * MIB
"""What containers get by default; MPI's and NCCL's ranks of one machine exchange through it."""

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
        found = read_key(path)
    except OSError as error:
        return failed("Job key", f"{path}: {error.strerror}", "set HVDTRAIN_JOB_SECRET to a secret of your own")
    except LaunchError as error:
        return failed("Job key", error.message, f"rm {path}")
    return ok("Job key", str(path) if found else f"{path} is made when it is first needed")


@dataclass(frozen=True)
class Outcome:
    """Outcome of a command."""

    returncode: int | None
    """None where it took too long and was killed."""
    output: str
    """What it printed, standard error included."""

    def tail(self, lines: int = 6) -> str:
        """Return the last lines that say something."""
        return "\n".join([line.rstrip() for line in self.output.splitlines() if line.strip()][-lines:])


def run(command: Sequence[str], *, timeout: float, environ: Mapping[str, str] | None = None) -> Outcome:
    """Run `command` for `timeout` seconds at most; it and all it started are then killed.

    Raises:
        OSError: it cannot be started.
    """
    process = subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
        return Outcome(process.returncode, output.decode(errors="replace"))
    except subprocess.TimeoutExpired:
        kill_tree(process.pid)
        try:
            output, _ = process.communicate(timeout=5.0)
        except subprocess.TimeoutExpired as expired:  # one that escaped still holds the pipe open
            output = expired.output or b""
        return Outcome(None, output.decode(errors="replace"))
    except BaseException:
        kill_tree(process.pid)
        raise


def first_line(command: Sequence[str], *, timeout: float = 10.0) -> str | None:
    """Return the first line `command` prints, or None where it cannot be run or fails."""
    try:
        outcome = run(command, timeout=timeout)
    except OSError:
        return None
    lines = outcome.output.split("\n") if outcome.returncode == 0 else []
    return next((line.strip() for line in lines if line.strip()), None)


_MPIS = {
    "Open MPI": r"Open MPI|OpenRTE",
    "Intel MPI": r"Intel\(R\) MPI Library",
    "MPICH": r"MPICH Version|HYDRA build details",
    "Cray PALS": r"(?i:\bpals\b)",
}
"""What comes before the version where an MPI's library or its mpirun introduces itself. MVAPICH starts by hydra."""


def mpi_identity(text: str) -> tuple[str, str] | None:
    """Return maker and version, such as ``Open MPI`` and ``4.1.8``, from what an MPI says of itself; None if unclear.

    IBM Spectrum MPI is made of Open MPI 4, and has numbers of its own.
    """
    if "IBM Spectrum MPI" in text:
        return "Open MPI", "4"
    for maker, lead in _MPIS.items():
        if match := re.search(rf"(?:{lead})\D*(\d+(?:\.\d+)*)", text):
            return maker, match[1]
    return None


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants; launchers put ranks into sessions of their own."""
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def what_went_wrong(outcome: Outcome, report: Mapping[str, Any] | None, timeout: float) -> str:
    """Return why ranks that were launched did not report that all is well."""
    if report and "error" in report:
        return str(report["error"])
    if report and not report["ok"]:
        return f"an all-reduce came out wrong in {report.get('wrong_elements')} elements"
    how = f"no answer after {timeout:g} s" if outcome.returncode is None else f"exit code {outcome.returncode}"
    lines = [line for line in outcome.output.splitlines() if not _NO_PROBLEM.search(line)]
    return "\n".join([how, Outcome(None, "\n".join(lines)).tail()]).rstrip()


def find_report(output: str) -> dict[str, Any] | None:
    """Return rank 0's report from `output`, where the launcher may have put a prefix before it."""
    match = re.search(r'\{"ok": .*\}', output)
    try:
        report = json.loads(match[0]) if match else None
    except ValueError:
        return None
    return report if isinstance(report, dict) else None


def launch_environment(environ: Mapping[str, str], *, gpus: bool = False) -> dict[str, str]:
    """Return `environ` for ranks on this machine, however few cores it has, and for root in a container.

    The variables of a launcher that may have started this process are left out.

    Args:
        gpus: whether the ranks may see the GPUs; on one GPU, two ranks could not reduce.
    """
    settings = {
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    if not gpus:
        settings["CUDA_VISIBLE_DEVICES"] = "-1"
    if os.geteuid() == 0:
        settings |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return without_launcher(environ) | settings


def beside_python(program: str) -> str | None:
    """Return the path of a program of this Python's environment, also where that is not activated."""
    beside = Path(sys.executable).parent / program
    return str(beside) if beside.exists() else shutil.which(program)
