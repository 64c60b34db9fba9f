"""Measurements within a process: windows of steps, sides in turn, processor time, memory, bytes. No TensorFlow."""

import os
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import gather
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.tuning import CYCLE_TIME, EXCHANGE_DEFAULTS, LARGE_MESSAGES

SOURCES = Path(__file__).parents[2]
"""The folder of the package."""
MIB = 1024
"""KiB per MiB; Linux reports resident memory in KiB."""
PEAK = "VmHWM:"
"""Key of the peak memory (KiB) in /proc/PID/status."""
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Timing:
    """Windows of steps; those of the warm-up do not count."""

    steps: int
    """Steps of a window."""
    windows: int
    warm_up: int = 2
    """Windows for tracing and filling buffers."""
    breakdown: bool = False
    """Whether to measure the breakdown of the step."""

    @property
    def first(self) -> int:
        """Steps before the first counted one."""
        return self.warm_up * self.steps

    @property
    def last(self) -> int:
        """Steps up to the last counted one."""
        return (self.warm_up + self.windows) * self.steps


def window(step: Callable[[], Any], count: int) -> float:
    """Take `count` steps, wait for the tensor that the last one returns, and return the milliseconds per step."""
    begin = time.perf_counter()
    for _ in range(count - 1):
        step()
    step().numpy()
    return 1000.0 * (time.perf_counter() - begin) / count


def in_turn(
    sides: Mapping[str, Callable[[], float]],
    rounds: int,
    gather: Callable[[Any], list[Any]],
    *,
    warm_up: int = 1,
) -> dict[str, list[float]]:
    """Call `sides` in turn and return what each returns per round, on the slowest rank. Collective.

    Args:
        sides: measure something once.
        rounds: calls of each that count.
        gather: gathers a value of all ranks; before each call, too, so that no rank computes while others begin.
        warm_up: rounds before them.
    """
    times: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(warm_up + rounds):
        for side, call in sides.items():
            gather(None)
            taken = call()
            if number >= warm_up:
                times[side].append(taken)
    by_rank = gather(times)
    return {side: np.max([each[side] for each in by_rank], axis=0).tolist() for side in sides}


@dataclass(frozen=True)
class Usage:
    """CPU time and page faults of one or more processes, all of their threads included."""

    user_s: float = 0.0
    system_s: float = 0.0
    """Seconds in the kernel."""
    page_faults: int = 0
    """Faults for which nothing was read from disk: mostly first touches of memory from the system."""

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(self.user_s + other.user_s, self.system_s + other.system_s, self.page_faults + other.page_faults)

    def since(self, earlier: "Usage") -> "Usage":
        """Return what was used since `earlier`."""
        return self + Usage(-earlier.user_s, -earlier.system_s, -earlier.page_faults)


def own_usage() -> Usage:
    """Return what this process has used so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return Usage(used.ru_utime, used.ru_stime, used.ru_minflt)


def usage_of(pid: int) -> Usage:
    """Return what another process has used so far, in steps of the kernel's clock, from /proc/PID/stat."""
    # The second field, the program's name in parentheses, may contain spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return Usage(user_s=int(fields[11]) / ticks, system_s=int(fields[12]) / ticks, page_faults=int(fields[7]))


def peak_rss_mib(pid: int | str = "self") -> float:
    """Return the peak memory of a process, by default this one."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    return int(next(line for line in lines if line.startswith(PEAK)).split()[1]) / MIB


def forget_peak() -> None:
    """Reset this process's peak memory to what it holds."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def limit_cores(count: int) -> None:
    """Pin this process to the first `count` of its cores, if it has that many."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:count])


def process_settings(threads: int, environ: Mapping[str, str] = os.environ, *, malloc: str = "") -> dict[str, str]:
    """Return the settings of this process."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    exchange = {name: environ[name] for name in (*EXCHANGE_DEFAULTS, CYCLE_TIME, *LARGE_MESSAGES) if name in environ}
    # Reports may be published: name our own files without their folder.
    exchange = {name: value.removeprefix(f"{SOURCES}{os.sep}") for name, value in exchange.items()}
    memory = {"malloc": malloc} if malloc else {}
    return {"threads": str(threads), "cores of rank 0": cores, **memory, **exchange}


def usage_figures(used: Sequence[Usage], peaks: Sequence[float], steps: int) -> dict[str, Any]:
    """Return the figures of what all processes used.

    Args:
        used: what each rank, and what serves it, used over the counted steps.
        peaks: peak memory of each process, in MiB.
        steps: the number of counted steps.
    """
    total = sum(used, Usage())
    cpu_s = total.user_s + total.system_s
    return {
        "cpu_s": cpu_s / steps,
        "kernel_share": total.system_s / cpu_s if cpu_s else 0.0,
        "page_faults": total.page_faults / steps,
        "peak_rss_mib": [float(value) for value in peaks],
    }


class ServedProcesses:
    """The other ranks of a parameter-server job, measured by its chief; empty if every rank measures itself.

    Collective: every rank of such a job creates one after opening its session, to gather process ids.

    Raises:
        LaunchError: a rank is on another machine, or is missing.
    """

    def __init__(self, session: Session) -> None:
        self._others: list[int] = []
        if session.strategy is None or session.strategy.roles is None:
            return
        here = socket.gethostname()
        known = gather(session.link.control, [here, os.getpid()], timeout=TIMEOUT_S)
        if any(host != here for host, _ in known):
            raise LaunchError(
                "bench measures the processes of --backend parameter_server on one machine only. "
                f"Received: ranks on {', '.join(sorted({host for host, _ in known}))}."
            )
        if not session.serves:
            self._others = [pid for _, pid in known if pid != os.getpid()]

    def usage(self) -> Usage:
        """Return what all of them have used so far."""
        return sum((usage_of(pid) for pid in self._others), Usage())

    def peak_rss_mib(self) -> list[float]:
        """Return the peak memory of each."""
        return [peak_rss_mib(pid) for pid in self._others]


def sent_to_itself() -> int:
    """Return the bytes that this machine has sent on its loopback; 0 where the system does not tell."""
    loopback = psutil.net_io_counters(pernic=True).get("lo")
    return 0 if loopback is None else int(loopback.bytes_sent)
