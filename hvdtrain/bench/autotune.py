"""Autotuning of the exchange: coordinate search for the fastest settings on this machine. No TensorFlow."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from hvdtrain.bench.engine import Job, Launch
from hvdtrain.bench.report import Block, plain_section
from hvdtrain.bench.results import MOST_FOREIGN, Comparison, Round, Run
from hvdtrain.runtime.tuning import CYCLE_TIME, EXCHANGE_DEFAULTS, FUSION_THRESHOLD

CANDIDATES = {
    "OMPI_MCA_mpi_yield_when_idle": ("0",),
    CYCLE_TIME: ("0.5", "2"),
    FUSION_THRESHOLD: (str(4 * 2**20), str(64 * 2**20)),
}
"""Alternatives to each default, in the order in which they are tried."""
OF_MPI = ("OMPI_MCA_mpi_yield_when_idle",)
"""Settings without effect on Gloo."""
WORTH = 0.03
"""Fraction of the step time that a setting must save; launches with equal settings differ by less."""
DEFAULTS = "the defaults"


@dataclass
class Tuning:
    """The result of autotuning."""

    settings: dict[str, str] = field(default_factory=dict)
    """Settings to change from their defaults."""
    saved: float = 0.0
    """Fraction of the step time that they save, measured in turn with the defaults."""
    runs: list[Run] = field(default_factory=list)
    """Every launch, by the settings that differ from the defaults."""

    @property
    def noise(self) -> float | None:
        """The cores that other programs took, if too many for a reliable result."""
        taken = float(np.median([one.foreign_cores for run in self.runs for one in run.rounds]))
        return taken if taken > MOST_FOREIGN else None


def autotune(job: Job, launched: Launch, log: Callable[[str], None], *, mpi: bool) -> Tuning:
    """Try every candidate, keep those that save at least `WORTH`, and compare the result with the defaults again.

    Args:
        job: the steps to time.
        launched: launches a job once.
        log: receives a line of progress per launch.
        mpi: whether MPI exchanges; Gloo ignores some settings.

    Raises:
        LaunchFailed: a launch did not answer.
    """
    found, defaults = Tuning(), dict(EXCHANGE_DEFAULTS)

    def time_of(settings: Mapping[str, str]) -> float:
        changed = difference(settings, defaults)
        answer = launched(replace(job, environ=settings))
        name = shown(changed) or DEFAULTS
        taken = Round(figures=dict(answer.figures), foreign_cores=answer.foreign_cores)
        known = next((run for run in found.runs if run.name == name), None)
        if known is None:
            command = replace(job, environ=changed).shown
            known = Run(name=name, setting=dict(job.setting), command=command, facts=dict(answer.facts))
            found.runs.append(known)
        known.rounds.append(taken)
        milliseconds = float(np.median(taken.figures["windows_ms"]))  # type: ignore[arg-type]
        log(f"{milliseconds:9.2f} ms a step  {name}")
        return milliseconds

    best, least = defaults, time_of(defaults)
    for name, values in CANDIDATES.items():
        if name in OF_MPI and not mpi:
            continue
        for value in values:
            tried = {**best, name: value}
            if (milliseconds := time_of(tried)) < (1.0 - WORTH) * least:
                best, least = tried, milliseconds
    if best == defaults:
        return found
    # Measured again, in turn: the best of many is partly lucky, and the load of the machine may have changed.
    again = time_of(defaults)
    saved = 1.0 - time_of(best) / again
    if saved >= WORTH:
        found.settings, found.saved = difference(best, defaults), saved
    return found


def difference(settings: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that differ from the defaults."""
    return {name: value for name, value in settings.items() if value != defaults.get(name)}


def shown(settings: Mapping[str, str]) -> str:
    """Format settings for a shell."""
    return " ".join(f"{name}={value}" for name, value in settings.items())


def section(comparison: Comparison) -> Iterator[Block]:
    """Yield the blocks about a search."""
    about = (
        "Each launch changed one setting of the fastest so far; a setting was kept if it saved at least "
        f"{WORTH:.0%}. In the end the result took turns with the defaults; what it saves is that of this comparison."
    )
    yield from plain_section(comparison, "Settings of the exchange", about)
