"""Find the settings of the exchange that are fastest on this machine, one setting after the other; no TensorFlow."""

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
"""What is tried in place of each default, in this order."""
OF_MPI = ("OMPI_MCA_mpi_yield_when_idle",)
"""Settings that mean nothing to Gloo."""
WORTH = 0.03
"""The share of a step's time that another value must save: launches of the same settings differ by less."""

Ask = Callable[[Sequence[str], Mapping[str, str]], Answer]


@dataclass
class Tuning:
    """What was found."""

    settings: dict[str, str] = field(default_factory=dict)
    """Those that should not be the defaults."""
    saved: float = 0.0
    """The share of a step's time that they save, against the defaults in turn."""
    foreign: list[float] = field(default_factory=list)
    """Cores' worth of time that other programs took during each launch."""

    @property
    def noise(self) -> float | None:
        """What other programs took, where that was too much to believe what was found."""
        taken = float(np.median(self.foreign))
        return taken if taken > MOST_FOREIGN else None


def autotune(point: Point, how: Launching, ask: Ask, tell: Callable[[str], None]) -> Tuning:
    """Try every candidate, keep what saves at least `WORTH`, and compare the whole with the defaults once more.

    Args:
        point: what is timed: a model on a backend of Horovod.
        how: how it is launched each time.
        ask: runs a command in an environment that has these variables set.
        tell: is given a line on each launch.

    Raises:
        LaunchFailed: a launch did not answer.
    """
    found = Tuning()
    defaults, command = dict(EXCHANGE_DEFAULTS), command_of(point, how)

    def time_of(settings: Mapping[str, str]) -> float:
        answer = ask(command, settings)
        found.foreign.append(answer.foreign_cores)
        milliseconds = float(np.median(answer.value["windows_ms"]))
        tell(f"{milliseconds:9.2f} ms a step  {shown(difference(settings, defaults)) or 'the defaults'}")
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
    # Anew, and next to each other: the best of many is fast by chance, too, and the machine may have changed.
    again = time_of(defaults)
    saved = 1.0 - time_of(best) / again
    if saved >= WORTH:
        found.settings, found.saved = difference(best, defaults), saved
    return found


def difference(settings: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Return those of `settings` that are not the default."""
    return {name: value for name, value in settings.items() if value != defaults.get(name)}


def shown(settings: Mapping[str, str]) -> str:
    """Return settings as a shell takes them."""
    return " ".join(f"{name}={value}" for name, value in settings.items())
