"""Step times and throughput of the loop, and its waits for data."""

import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import TypeVar

import numpy as np

HAND_OVER_S = 5e-4
"""Taking a ready batch of digits takes 0.28 to 0.43 ms (2 cores, 10th to 90th percentile of 380)."""

T = TypeVar("T")

WARM_UP_STEPS = 5
"""Initial steps that are not steady: tracing, filling of buffers and caches."""
KEPT_STEPS = 10_000
"""Latest steps kept for median and percentiles: a run may take billions."""


class StepClock:
    """Records the wall time of each step, excluding pauses (evaluation, checkpoints).

    Constant memory.

    Args:
        overlapping: whether steps run asynchronously and only some are waited for: the time between waits is divided
            equally. Data are read in the meantime, so data waits cannot be measured.
    """

    def __init__(self, samples_per_step: int, *, overlapping: bool = False) -> None:
        self._samples = samples_per_step
        self._overlapping = overlapping
        self._warm_up: list[float] = []
        self._steady: deque[float] = deque(maxlen=KEPT_STEPS)
        self._steady_seconds = 0.0
        self._steady_waits = 0.0
        self.steady_steps = 0
        """Steps after the warm-up."""
        self._recent: Counter[bool] = Counter()
        self._recent_seconds: dict[bool, float] = {True: 0.0, False: 0.0}
        """Steps since the last report and their seconds: of those that compiled, and of the others."""
        self._under_way, self._waits = 0, 0.0
        """Steps since the last waited one, and the seconds for which they waited for data."""
        self._begin = time.perf_counter()
        self.last_wait = 0.0
        """Seconds waited for the last batch."""

    def resume(self) -> None:
        """Restart timing after a pause."""
        self._begin = time.perf_counter()

    def next_of(self, batches: Iterator[T]) -> T:
        """Return the next batch, recording the wait for it."""
        begin = time.perf_counter()
        batch = next(batches)
        waited = 0.0 if self._overlapping else time.perf_counter() - begin - HAND_OVER_S
        self.last_wait = max(0.0, waited)
        self._waits += self.last_wait
        return batch

    def tick(self, steps: int = 1, *, waited: bool = True, compiled: bool = False) -> None:
        """Record the end of steps, or their unawaited start; `compiled`: their time says nothing of the others'."""
        now = time.perf_counter()
        self._under_way += steps
        if self._overlapping and not waited:
            return
        each, waited_each = (now - self._begin) / self._under_way, self._waits / self._under_way
        for _ in range(self._under_way):
            self.note(each, waited_each, compiled=compiled)
        self._under_way, self._waits, self._begin = 0, 0.0, now

    def note(self, seconds: float, waited: float = 0.0, *, compiled: bool = False) -> None:
        """Count a step of `seconds`, `waited` of them for data."""
        self._recent[compiled] += 1
        self._recent_seconds[compiled] += seconds
        if len(self._warm_up) < WARM_UP_STEPS:
            self._warm_up.append(seconds)
            return
        self.steady_steps += 1
        self._steady.append(seconds)
        self._steady_seconds += seconds
        self._steady_waits += waited

    def samples_per_second(self) -> float:
        """Return the throughput over the steps since the last call, without those that compiled if there are others."""
        compiled = not self._recent[False]
        steps, seconds = self._recent[compiled], self._recent_seconds[compiled]
        self._recent.clear()
        self._recent_seconds = {True: 0.0, False: 0.0}
        return self._samples * steps / seconds if steps else 0.0

    def waiting_share(self) -> float:
        """Return the fraction of steady steps' time spent waiting for data; 0 initially."""
        return self._steady_waits / self._steady_seconds if self._steady_seconds else 0.0

    def waited(self) -> float:
        """Return the seconds that steady steps have waited for data."""
        return self._steady_waits

    def steady_ms(self) -> list[float]:
        """Return the times of the last `KEPT_STEPS` steady steps in ms; initially of the warm-up."""
        return [1000.0 * seconds for seconds in self._steady or self._warm_up]

    def steady_samples_per_second(self) -> float:
        """Return the median throughput over the steps of `steady_ms`."""
        steady = self.steady_ms()
        return float(1000.0 * self._samples / np.median(steady)) if steady else 0.0
