"""A rank that is slower than the others is named, and nobody is by chance."""

import random
import threading
import time

import pytest

from hvdtrain.observability.wording import slow_rank
from hvdtrain.runtime.hang import signs
from hvdtrain.runtime.hang.signs import MOST_BLOCKS, WARM_UP_STEPS, Activity, Block, StepTimer
from hvdtrain.runtime.stragglers import RankTimes, StragglerWatch, any_thread_runs, slowest_rank


class Board:
    """A status board of several ranks in one process."""

    def __init__(self, size):
        self.size, self.posted = size, {}

    def of(self, rank):
        board = self

        class Channel:
            size = board.size

            def post(self, key, value):
                board.posted[rank] = value

            def read(self, key):
                return dict(board.posted)

        Channel.rank = rank
        return Channel()


def minutes_of(shares, minutes, *, seconds_a_step=0.5, phase="step"):
    """Let ranks compute for these shares of each step; return the warnings."""
    board, warned, draw = Board(len(shares)), [], random.Random(0)
    activities = [Activity() for _ in shares]
    watches = [
        StragglerWatch(
            board.of(rank), activities[rank], f"host{rank}", works=lambda s=share: draw.random() < s, warn=warned.append
        )
        for rank, share in enumerate(shares)
    ]
    for second in range(int(60 * minutes)):
        for activity, watch in reversed(list(zip(activities, watches, strict=True))):
            activity.phase = phase
            for step in range(int(1 / seconds_a_step)):
                begin = second + step * seconds_a_step
                activity.times.note(begin + 0.001, begin + seconds_a_step)
            watch.look(1000.0 + second)
    return warned


def test_a_slow_rank_is_named_once_with_its_host_and_the_times():
    warned = minutes_of([0.5, 0.5, 0.98, 0.5], 20)
    assert len(warned) == 1
    assert "rank 2 (host2) is slower than the others, which wait for it: 49" in warned[0]
    assert minutes_of([0.5, 0.5, 0.98, 0.5], 2.9) == []


@pytest.mark.parametrize("shares", [[0.6, 0.6], [0.6] * 32, [0.9, 0.97], [1.0, 1.0, 1.0]])
def test_ranks_that_are_alike_are_not(shares):
    assert minutes_of(shares, 60) == []


def test_outside_of_training_nothing_is_measured():
    assert minutes_of([0.1, 0.99], 20, phase="") == []
    assert minutes_of([0.1, 0.99], 20, phase="saving") == []
    assert minutes_of([0.1, 0.99], 20, seconds_a_step=1e9) == [], "a window without a step"


def trained(outside, compute, *, steps=64, jitter=0.0, looks=0, seed=0):
    """Times of ranks that take so long, in seconds, before and within each step, and wait for the slowest."""
    draw, timers = random.Random(seed), [StepTimer() for _ in outside]
    now = 0.0
    for _ in range(steps + 6):
        before = [each + abs(draw.gauss(0, jitter)) for each in outside]
        end = now + max(each + own for each, own in zip(before, compute, strict=True))
        for timer, each in zip(timers, before, strict=True):
            timer.note(now + each, end)
        now = end
    inside = [max(map(sum, zip(outside, compute, strict=True))) - each for each in outside]
    return [
        RankTimes(f"node-{rank}", timer.blocks, looks, round(looks * own / within))
        for rank, (timer, own, within) in enumerate(zip(timers, compute, inside, strict=True))
    ]


@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_rank_that_is_slow_between_its_steps_is_named_with_what_it_costs(slow):
    outside = [0.01, 0.01, 0.01]
    outside[slow] = 0.06
    found = slowest_rank(trained(outside, [0.05, 0.05, 0.05]))
    assert (found.rank, found.host) == (slow, f"node-{slow}")
    assert found.own_ms == pytest.approx(110, abs=1)
    assert found.others_ms == pytest.approx(60, abs=1)
    assert found.share == pytest.approx(50 / 110, abs=0.01)


def test_a_rank_that_computes_more_slowly_is_named_by_the_looks_at_it():
    times = trained([0.01, 0.01], [0.05, 0.11], looks=200)
    found = slowest_rank(times)
    assert (found.rank, round(found.share, 1)) == (1, 0.5)
    few = [RankTimes(each.host, each.blocks, 5, each.working // 40) for each in times]
    assert slowest_rank(few) is None


def test_equal_ranks_are_not_told_apart():
    for seed in range(200):
        draw = random.Random(seed)
        times = trained([0.01, 0.01], [0.05, 0.05], jitter=0.004, seed=seed, steps=40)
        looked = [RankTimes(each.host, each.blocks, 40, sum(draw.random() < 0.6 for _ in range(40))) for each in times]
        assert slowest_rank(times) is None
        assert slowest_rank(looked) is None


def test_one_long_pause_is_chance():
    times = trained([0.01, 0.01], [0.05, 0.05], steps=64)
    times[1].blocks[3].outside += 60.0
    times[0].blocks[3].inside += 60.0
    assert slowest_rank(times) is None


def test_short_trainings_and_single_ranks_name_nobody():
    assert slowest_rank(trained([0.01, 0.2], [0.05, 0.05], steps=8)) is None
    assert slowest_rank(trained([0.01], [0.05])) is None


def test_memory_does_not_grow_with_the_steps():
    timer = StepTimer()
    for step in range(10_000):
        timer.note(step + 0.25, step + 1.0)
    assert len(timer.blocks) <= MOST_BLOCKS
    assert sum(block.steps for block in timer.blocks) == 10_000 - 5
    assert sum(block.outside for block in timer.blocks) == pytest.approx(0.25 * 9_995)


def test_what_comes_before_a_pause_does_not_count():
    timer = StepTimer()
    for step in range(20):
        timer.note(step + 0.25, step + 1.0)
        if step % 2:
            timer.pause()
    assert sum(block.steps for block in timer.blocks) == 8  # of 15 after the warm-up


def test_what_is_said_names_rank_host_and_share():
    found = slowest_rank(trained([0.01, 0.06], [0.05, 0.05]))
    said = "rank 1 (node-1), 110 ms of its own per step, others 60 ms: they waited for it 45% of the time"
    assert slow_rank(found.as_dict()) == said
    assert slow_rank(None) == ""


def test_a_thread_that_runs_is_seen():
    seen, done = [], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(any_thread_runs())
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    time.sleep(0.5)
    idle = list(seen)
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        time.time()
    done.set()
    watcher.join()
    assert sum(seen[len(idle) :]) / len(seen[len(idle) :]) > 0.7
    assert sum(idle) / len(idle) < 0.5


def test_an_exchange_between_steps_is_time_in_which_a_rank_waits(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(signs.time, "perf_counter", lambda: now[0])
    timer = StepTimer()
    for _ in range(WARM_UP_STEPS + 3):
        with timer.waiting():
            now[0] += 0.5
        now[0] += 0.25
        timer.note(now[0], now[0] + 1.0)
        now[0] += 1.0
    assert timer.total() == Block(3, outside=3 * 0.25, inside=3 * 1.5)
