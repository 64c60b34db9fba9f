"""Whether steps wait for their data, and what is said about it."""

from hvdtrain.backends.protocol import Backend
from hvdtrain.training.loop.clock import StepClock

WAITING_SHARE = 0.05
"""Share of the time that steps may wait for data before that is worth a word."""
ENOUGH_STEPS = 30
"""Steady steps before a share is believed: of 3, one late batch makes 7 %."""
TIMEOUT_S = 600.0


class WaitingWatch:
    """Compares now and then over all ranks how long steps wait for data, and tells of it once.

    It looks after so many steady steps and whenever their number has doubled: ranks exchange a word then.

    Args:
        backend: the replicas: one that waits lets all others wait in the exchange, which is none of their waiting.
        clock: this rank's.
        remedy: what helps, in a sentence.
    """

    def __init__(self, backend: Backend, clock: StepClock, remedy: str) -> None:
        self._backend = backend
        self._clock = clock
        self._remedy = remedy
        self._next = ENOUGH_STEPS
        self._told = False

    def look(self) -> str | None:
        """Return what is to be said, if anything; every rank calls it after the same steps."""
        if self._told or self._clock.steady_steps < self._next:
            return None
        self._next = 2 * self._clock.steady_steps
        mine = repr(self._clock.waiting_share()).encode()
        shares = [float(share) for share in self._backend.gather_bytes(mine, timeout=TIMEOUT_S)]
        said = waiting_warning(shares, self._remedy)
        self._told = said is not None
        return said


def waiting_warning(shares: list[float], remedy: str) -> str | None:
    """Return what to say where steps waited for data, on each rank for such a share of their time; None for little."""
    most = max(shares)
    if most <= WAITING_SHARE:
        return None
    where = f" on rank {shares.index(most)}" if len(shares) > 1 else ""
    return f"warning: steps wait for data {most:.0%} of the time{where}. {remedy}"
