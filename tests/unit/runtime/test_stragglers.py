"""A rank that is slower than the others is named, and nobody is by chance."""

import random
import threading
import time

import pytest

from hvdtrain.runtime.hang.signs import Activity
from hvdtrain.runtime.stragglers import Pace, StragglerWatch, any_thread_runs, slowest


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
    """Let ranks work for these shares of each step; return what was told."""
    board, told, draw = Board(len(shares)), [], random.Random(0)
    activities = [Activity() for _ in shares]
    watches = [
        StragglerWatch(
            board.of(rank),
            activities[rank],
            f"host{rank}",
            works=lambda share=share: draw.random() < share,
            tell=told.append,
        )
        for rank, share in enumerate(shares)
    ]
    for second in range(int(60 * minutes)):
        for activity, watch in reversed(list(zip(activities, watches, strict=True))):
            activity.phase, activity.step = phase, int(second / seconds_a_step)
            watch.look(1000.0 + second)
    return told


def test_a_slow_rank_is_named_once_with_its_host_and_the_times():
    told = minutes_of([0.5, 0.5, 0.98, 0.5], 20)
    assert len(told) == 1
    assert "rank 2 (host2) is slower than the others, which wait for it: 500.0 ms" in told[0]
    assert minutes_of([0.5, 0.5, 0.98, 0.5], 2.9) == []


@pytest.mark.parametrize("shares", [[0.6, 0.6], [0.6] * 32, [0.9, 0.97], [1.0, 1.0, 1.0]])
def test_ranks_that_are_alike_are_not(shares):
    assert minutes_of(shares, 60) == []


def test_outside_of_training_nothing_is_measured():
    assert minutes_of([0.1, 0.99], 20, phase="") == []
    assert minutes_of([0.1, 0.99], 20, phase="saving") == []


def test_a_window_without_a_step_says_nothing():
    assert minutes_of([0.1, 0.99], 20, seconds_a_step=1e9) == []


def test_a_pace_travels():
    pace = Pace(window=3, host="a", working=0.5, steps=100, seconds=60.0)
    assert Pace.decode(pace.encode()) == pace
    assert pace.step_ms == pytest.approx(300.0)
    assert slowest([pace, Pace(window=3, host="b", working=0.9, steps=100, seconds=60.0)]) == 1


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
