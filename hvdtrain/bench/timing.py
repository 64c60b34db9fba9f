"""How long a side is measured, and what every process notes of itself; no TensorFlow."""

import json
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.runtime.tuning import EXCHANGE_DEFAULTS, LARGE_MESSAGES

SOURCES = Path(__file__).parents[2]
"""The folder that the package lies in."""
MIB = 1024
"""KiB, in which Linux counts resident memory."""


@dataclass(frozen=True)
class Timing:
    """Windows of steps: those of the warm-up are not counted."""

    steps: int
    """Steps of a window."""
    windows: int
    warm_up: int = 2
    """Windows in which graphs are traced and buffers fill."""
    breakdown: bool = False
    """Whether to find out where a step's time goes."""

    @property
    def first(self) -> int:
        """Steps before the first that counts."""
        return self.warm_up * self.steps

    @property
    def last(self) -> int:
        """Steps up to the last that counts."""
        return (self.warm_up + self.windows) * self.steps


def processor_seconds() -> float:
    """Return the time that all threads of this process have computed."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def peak_rss_mib() -> float:
    """Return the most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / MIB


def limit_cores(count: int) -> None:
    """Keep this process and its threads to the first `count` of its cores, where it has so many."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:count])


def process_settings(threads: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what this process runs with."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    exchange = {name: environ[name] for name in (*EXCHANGE_DEFAULTS, *LARGE_MESSAGES) if name in environ}
    # A report may be published: of a file of ours it says which, not in whose folder.
    exchange = {name: value.removeprefix(f"{SOURCES}{os.sep}") for name, value in exchange.items()}
    return {"threads": str(threads), "cores of rank 0": cores, **exchange}


def merged(own: Mapping[str, Any], cpu_s: Sequence[float], rss: Sequence[float]) -> dict[str, Any]:
    """Return what rank 0 prints: its own figures, with the processor time and memory of every process."""
    return {**own, "cpu_s": float(sum(cpu_s)), "peak_rss_mib": [float(value) for value in rss]}


def say(answer: Mapping[str, Any]) -> None:
    """Print the answer in the line that the suite looks for."""
    print(f"{WORD} {json.dumps(answer)}", flush=True)


WORD = "HVDTRAIN-BENCH"
