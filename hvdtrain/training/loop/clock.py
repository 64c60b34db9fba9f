"""Step times and throughput as the loop sees them."""

import time
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

HAND_OVER_S = 5e-4
"""Taking a batch of digits that is ready takes 0.28 to 0.43 ms (2 cores, 10th to 90th percentile of 380)."""

T = TypeVar("T")

WARM_UP_STEPS = 5
"""Steps after the start that are not steady: tracing, filling of buffers and caches."""


class StepClock:
    """Collects the wall time of each step, leaving out what happens between steps (evaluation, checkpoints).

    Args:
        samples_per_step: samples of a full global batch.
        overlapping: whether steps are under way while the next ones are started, and only some are waited for: those
            up to each of these share the time alike. The data are read meanwhile, and no step waits for them that
            could be seen here.
    """

    def __init__(self, samples_per_step: int, *, overlapping: bool = False) -> None:
        self._samples = samples_per_step
        self._overlapping = overlapping
        self._shared = 0
        self._times: list[float] = []
        self._waits: list[float] = []
        self._logged = 0
        self._last = time.perf_counter()

    def resume(self) -> None:
        """Start timing anew after a pause."""
        self._last = time.perf_counter()

    def next_of(self, batches: Iterator[T]) -> T:
        """Return the next batch, noting how long it had to be waited for."""
        begin = time.perf_counter()
        batch = next(batches)
        waited = 0.0 if self._overlapping else time.perf_counter() - begin - HAND_OVER_S
        self._waits.append(max(0.0, waited))
        return batch

    def tick(self, *, waited: bool = True) -> None:
        """Note the end of a step, or, of one that was not waited for, that it was started."""
        now = time.perf_counter()
        self._times.append(now - self._last)
        self._last = now
        if self._overlapping and waited:
            together = self._times[self._shared :]
            self._times[self._shared :] = [sum(together) / len(together)] * len(together)
            self._shared = len(self._times)

    def samples_per_second(self) -> float:
        """Return the throughput over the steps since the last call."""
        recent = self._times[self._logged :]
        self._logged = len(self._times)
        return self._samples * len(recent) / sum(recent) if recent else 0.0

    @property
    def steady_steps(self) -> int:
        """Steps since those at the start."""
        return max(0, len(self._times) - WARM_UP_STEPS)

    def waiting_share(self) -> float:
        """Return the share of the steady steps' time in which they waited for data; 0 before there are any."""
        steady = self._times[WARM_UP_STEPS:]
        return sum(self._waits[WARM_UP_STEPS : len(self._times)]) / sum(steady) if steady else 0.0

    def steady_ms(self) -> list[float]:
        """Return the times of the steady steps in milliseconds; of all steps if there are no more than the warm-up."""
        steady = self._times[WARM_UP_STEPS:] or self._times
        return [1000.0 * seconds for seconds in steady]

    def steady_samples_per_second(self) -> float:
        """Return the median throughput over the steady steps."""
        steady = self.steady_ms()
        return float(1000.0 * self._samples / np.median(steady)) if steady else 0.0
