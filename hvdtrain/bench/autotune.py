"""Autotuning of the exchange: coordinate search for the fastest settings on this machine. No TensorFlow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.bench.launching import Answer
from hvdtrain.bench.noise import MOST_FOREIGN
from hvdtrain.bench.plan import Point
from hvdtrain.bench.sides import side
from hvdtrain.bench.suite import Launching, command_of
from hvdtrain.runtime.tuning import EXCHANGE_DEFAULTS

CANDIDATES = {
    "OMPI_MCA_mpi_yield_when_idle": ("0",),
    "HOROVOD_CYCLE_TIME": ("0.1", "2"),
    "HOROVOD_FUSION_THRESHOLD": (str(4 * 2**20), str(64 * 2**20)),
}
"""Alternatives to each default, in the order in which they are tried."""
OF_MPI = ("OMPI_MCA_mpi_yield_when_idle",)
"""Settings without effect on Gloo."""
WORTH = 0.03
"""Fraction of the step time that a setting must save; launches with equal settings differ by less."""

Ask = Callable[[Sequence[str], Mapping[str, str]], Answer]


@dataclass
class Tuning:
    """The result of autotuning."""

    settings: dict[str, str] = field(default_factory=dict)
    """Settings to change from their defaults."""
    saved: float = 0.0
    """Fraction of the step time that they save, measured in turn with the defaults."""
    foreign: list[float] = field(default_factory=list)
    """Cores that other programs kept busy during each launch."""

    @property
    def noise(self) -> float | None:
        """A description of the load by other programs, if it was too high for a reliable result."""
        taken = float(np.median(self.foreign))
        return taken if taken > MOST_FOREIGN else None


def autotune(point: Point, how: Launching, ask: Ask, log: Callable[[str], None]) -> Tuning:
    """Try every candidate, keep those that save at least `WORTH`, and compare the result with the defaults again.

    Args:
        point: what to time: a model on a backend of Horovod.
        how: how to launch it.
        ask: runs a command with additional environment variables.
        log: receives a line of progress per launch.

    Raises:
        LaunchFailed: a launch did not answer.
    """
    found = Tuning()
    defaults, command = dict(EXCHANGE_DEFAULTS), command_of(point, how)

    def time_of(settings: Mapping[str, str]) -> float:
        answer = ask(command, settings)
        found.foreign.append(answer.foreign_cores)
        milliseconds = float(np.median(answer.value["windows_ms"]))
        log(f"{milliseconds:9.2f} ms a step  {shown(difference(settings, defaults)) or 'the defaults'}")
        return milliseconds

    best, least = defaults, time_of(defaults)
    for name, values in CANDIDATES.items():
        if name in OF_MPI and side(point.side).launcher != "mpirun":
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
