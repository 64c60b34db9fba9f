"""How long a run will take, from the pace so far and without what happens once: tracing and compiling."""

from collections import deque
from statistics import median_low

from hvdtrain.observability.events import RunInfo, StepRecord

COMPILING_STEPS = 2
"""The first step compiles the step that is logged, the second the one that is not: their times tell nothing."""
KEPT_WINDOWS = 51
"""Windows between two logged steps whose median is the pace: one in which a short batch is compiled does not count."""


class Pace:
    """Estimates the remaining time of a run: steps at their usual pace, and evaluations as long as the shortest so far.

    Between its first logged steps the pace is the mean since the first ones were compiled.

    Args:
        info: the run.
    """

    def __init__(self, info: RunInfo) -> None:
        self._info = info
        self._step = self._first = info.start_step
        self._now = self._since = 0.0
        self._windows: deque[float] = deque(maxlen=KEPT_WINDOWS)
        self._logged: int | None = None
        self._evaluations: list[float] = []
        self._epochs = 0

    def progress(self, step: int, now: float) -> None:
        """Note that `step` steps are finished at time `now`."""
        self._step, self._now = step, now
        if step <= self._info.start_step + COMPILING_STEPS:
            self._first, self._since = step, now

    def logged(self, record: StepRecord) -> None:
        """Note the throughput since the last logged step."""
        before, self._logged = self._logged, record.step
        clean = before is not None and before >= self._info.start_step + COMPILING_STEPS
        if clean and record.samples_per_second > 0:
            self._windows.append(self._info.global_batch / record.samples_per_second)

    def evaluated(self, seconds: float) -> None:
        """Note an evaluation, whose time is none of the steps'."""
        self._evaluations.append(seconds)
        self._since += seconds

    def epoch(self) -> None:
        """Note the end of an epoch."""
        self._epochs += 1

    def remaining(self) -> float | None:
        """Return the seconds left; None if unknown yet."""
        step_seconds = self._step_seconds()
        if self._step >= self._info.total_steps:
            return 0.0
        if step_seconds is None:
            return None
        return (self._info.total_steps - self._step) * step_seconds + self._evaluation_seconds()

    def _step_seconds(self) -> float | None:
        if self._windows:
            return median_low(self._windows)
        steps = self._step - self._first
        return max(0.0, self._now - self._since) / steps if steps > 0 else None

    def _evaluation_seconds(self) -> float:
        """Return the time of the evaluations to come, as often as those so far."""
        if not self._evaluations or not self._epochs:
            return 0.0
        epochs = self._info.epochs - self._info.epoch_of(self._info.start_step + 1) - self._epochs
        return max(0, epochs) * min(self._evaluations) * len(self._evaluations) / self._epochs
