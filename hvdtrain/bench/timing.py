"""Timing windows, and the resource use of each process. No TensorFlow."""

import json
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def processor_seconds() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss_mib() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def limit_cores(count: int) -> None:
    """Pin this process to the first `count` of its cores, if it has that many."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:count])


def process_settings(threads: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings of this process."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    exchange = {name: environ[name] for name in (*EXCHANGE_DEFAULTS, *LARGE_MESSAGES) if name in environ}
    # Reports may be published: name our own files without their folder.
    exchange = {name: value.removeprefix(f"{SOURCES}{os.sep}") for name, value in exchange.items()}
    return {"threads": str(threads), "cores of rank 0": cores, **exchange}


def merged(own: Mapping[str, Any], cpu_s: Sequence[float], rss: Sequence[float]) -> dict[str, Any]:
    """Return rank 0's answer: its own figures, with CPU time and memory of all processes."""
    return {**own, "cpu_s": float(sum(cpu_s)), "peak_rss_mib": [float(value) for value in rss]}


def say(answer: Mapping[str, Any]) -> None:
    """Print the answer on the line that the suite parses."""
    print(f"{WORD} {json.dumps(answer)}", flush=True)


WORD = "HVDTRAIN-BENCH"
