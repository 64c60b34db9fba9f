"""Timing windows, and the resource use of each process. No TensorFlow."""

import json
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.runtime.malloc import Malloc
from hvdtrain.runtime.tuning import EXCHANGE_DEFAULTS, LARGE_MESSAGES

SOURCES = Path(__file__).parents[2]
"""The folder of the package."""
MIB = 1024
"""KiB per MiB; Linux reports resident memory in KiB."""


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
        return Usage(
            self.user_s - earlier.user_s, self.system_s - earlier.system_s, self.page_faults - earlier.page_faults
        )


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


def peak_rss_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def limit_cores(count: int) -> None:
    """Pin this process to the first `count` of its cores, if it has that many."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:count])


def process_settings(
    threads: int, environ: Mapping[str, str] = os.environ, *, malloc: Malloc | None = None
) -> dict[str, str]:
    """Return the settings of this process."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    exchange = {name: environ[name] for name in (*EXCHANGE_DEFAULTS, *LARGE_MESSAGES) if name in environ}
    # Reports may be published: name our own files without their folder.
    exchange = {name: value.removeprefix(f"{SOURCES}{os.sep}") for name, value in exchange.items()}
    memory = {} if malloc is None else {"malloc": malloc.about}
    return {"threads": str(threads), "cores of rank 0": cores, **memory, **exchange}


def merged(own: Mapping[str, Any], used: Sequence[Usage], rss: Sequence[float], steps: int) -> dict[str, Any]:
    """Return rank 0's answer: its own figures, and what all processes used.

    Args:
        own: figures of rank 0.
        used: what each rank, and what serves it, used over the counted steps.
        rss: peak memory of each process, in MiB.
        steps: the number of counted steps.
    """
    total = sum(used, Usage())
    cpu_s = total.user_s + total.system_s
    return {
        **own,
        "cpu_s": cpu_s / steps,
        "kernel_share": total.system_s / cpu_s if cpu_s else 0.0,
        "page_faults": total.page_faults / steps,
        "peak_rss_mib": [float(value) for value in rss],
    }


def say(answer: Mapping[str, Any]) -> None:
    """Print the answer on the line that the suite parses."""
    print(f"{WORD} {json.dumps(answer)}", flush=True)


WORD = "HVDTRAIN-BENCH"
