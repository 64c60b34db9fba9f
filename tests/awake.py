"""How long something took, without the time in which the whole machine stood still.

A virtual machine that is moved or saved may stand still for minutes, while the clocks that programs see go on. A limit
on a job's time is there to end one that hangs, and is kept on seconds in which it could have gone on.
"""

import threading
import time
from collections.abc import Callable

TICK_S = 0.1
LONGEST_TICK_S = 1.0
"""What one tick counts at most: on a machine that is merely busy ticks come late, by less."""


class AwakeClock:
    """Counts ticks of a thread of its own, by a clock that goes on while the machine stands still."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = 0.0
        self._clock = clock
        threading.Thread(target=self._tick, name="awake", daemon=True).start()

    def seconds(self) -> float:
        """Return seconds since some moment, for differences."""
        return self._seconds

    def _tick(self) -> None:
        last = self._clock()
        while True:
            time.sleep(TICK_S)
            now = self._clock()
            self._seconds += min(now - last, LONGEST_TICK_S)
            last = now


awake_seconds = AwakeClock().seconds
