"""The remaining time of a run: what happens once, such as compiling, is no measure of the rest."""

import pytest

from hvdtrain.observability.console import Pace
from hvdtrain.observability.events import StepRecord
from tests.builders import run_info


class Run:
    """Takes steps of 0.1 s; the first two compile for 20 s each, and those in `slow` take so much longer."""

    def __init__(self, log_every: int = 10, slow: dict[int, float] | None = None, **changes: object) -> None:
        self.info = run_info(total_steps=1000, steps_per_epoch=100, **changes)
        self.pace = Pace(info=self.info)
        self.now = 1000.0
        self.step = self.info.start_step
        self._log_every = log_every
        self._slow = {self.step + 1: 20.0, self.step + 2: 20.0, **(slow or {})}
        self._since, self._logged = self.now, self.step

    def take(self, steps: int) -> float | None:
        for _ in range(steps):
            self.step += 1
            self.now += 0.1 + self._slow.get(self.step, 0.0)
            self.pace.progress(self.step, self.now)
            if self.step % self._log_every == 0 or self.step == self.info.start_step + 1:
                self._log()
        return self.pace.remaining()

    def _log(self) -> None:
        rate = 64 * (self.step - self._logged) / (self.now - self._since)
        self.pace.logged(StepRecord(step=self.step, epoch=0, loss=0.0, learning_rate=0.1, samples_per_second=rate))
        self._since, self._logged = self.now, self.step

    def evaluate(self, seconds: float) -> None:
        self.now += seconds
        self._since += seconds
        self.pace.evaluated(seconds)
        self.pace.epoch()


@pytest.mark.parametrize("log_every", [1, 10, 1000])
@pytest.mark.parametrize("start", [0, 230])
def test_compiling_is_no_part_of_the_pace(log_every: int, start: int) -> None:
    run = Run(log_every, start_step=start)
    assert run.take(1) is None
    assert run.take(1) is None
    for _ in range(30):
        assert run.take(1) == pytest.approx((1000 - run.step) * 0.1)


def test_evaluations_to_come_are_added_as_long_as_the_shortest_so_far() -> None:
    run = Run()
    run.take(100)
    run.evaluate(30.0)  # the first one compiles
    assert run.take(1) == pytest.approx(89.9 + 9 * 30.0)
    run.take(99)
    run.evaluate(2.0)
    assert run.take(1) == pytest.approx(79.9 + 8 * 2.0)


def test_steps_that_are_one_call_have_a_pace_from_the_third_call_on() -> None:
    pace = Pace(run_info(total_steps=100, steps_per_epoch=100))
    for call, left in enumerate([None, None, 76 * 0.5, 68 * 0.5], 1):
        pace.progress(8 * call, 5000.0 + 4.0 * call)
        assert pace.remaining() == left
