"""Whether a job hangs: what ranks say of themselves, and what is concluded from it."""

import contextlib
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdtrain.config.errors import LaunchError, on_command_line
from hvdtrain.runtime import hang
from hvdtrain.runtime.hang.position import Position
from hvdtrain.runtime.hang.progress import ProgressWatch, Report
from hvdtrain.runtime.hang.signs import Activity, Signs
from hvdtrain.runtime.hang.watch import (
    HangWatch,
    Rhythm,
    Seen,
    decide,
    describe_hang,
    describe_left,
    describe_wait,
    left_alone,
)

T = 300.0
WAITS = Report("collective", "step", 12, idle=T + 1, collectives=("dp.gradients.0",))
STUCK = Report("code", "callbacks", 11, idle=T + 1, where="train.py:41 in on_batch_end")
WORKS = Report("code", "saving", 11, idle=0.0)
LEAVES = Report("leaving", idle=T + 1)
LOADS = Report("exchange", idle=T + 1)


def verdict_of(*reports, silent=()):
    ranks = {rank: Seen(report, T if rank in silent else 1.0) for rank, report in enumerate(reports)}
    return decide(ranks, timeout=T, silence=200.0), ranks


@pytest.mark.parametrize(
    ("reports", "silent", "hangs"),
    [
        ([WAITS, STUCK], [], True),  # an endless loop
        ([WAITS, WAITS], [], True),  # ranks that wait in different collectives
        ([WAITS, LEAVES], [], True),  # one collective too many
        ([WAITS, WORKS], [1], True),  # stopped while it saved
        ([LEAVES, WORKS], [1], True),
        ([LOADS, WORKS], [1], True),
        ([Report("exchange", "callbacks", 3, idle=T + 1), STUCK], [], True),
        ([WAITS, WAITS, WORKS], [], False),  # a long checkpoint
        ([STUCK, STUCK], [], False),  # hours between two collectives, on all ranks
        ([LEAVES, STUCK], [], False),  # a rank that works on after the end of training
        ([LOADS, STUCK], [], False),  # or before it: the exchange has a patience of its own
        ([LEAVES, LEAVES], [], False),
        ([Report("collective", "step", 12, idle=T - 1), STUCK], [], False),
    ],
)
def test_a_job_hangs_where_ranks_wait_and_none_goes_on(reports, silent, hangs):
    verdict, _ = verdict_of(*reports, silent=silent)
    assert verdict.hangs == hangs


def test_a_report_that_may_be_late_counts_a_little_earlier():
    ranks = {0: Seen(WAITS), 1: Seen(Report("code", idle=T - 2))}
    assert not decide(ranks, timeout=T, silence=200.0).hangs
    assert decide(ranks, timeout=T, silence=200.0, slack=2.5).hangs


def test_the_ranks_that_did_not_come_are_named_first_with_step_and_place():
    verdict, ranks = verdict_of(WAITS, WAITS, STUCK, WORKS, silent=[3])
    lines = describe_hang(verdict, ranks, T).splitlines()
    assert lines[0].startswith("The job hangs: no rank has made progress for 300 s")
    assert lines[1].startswith("  rank 3 gave no sign of life for 300 s")
    assert "saving at step 11" in lines[1]
    assert lines[2] == "  rank 2 did not come: in callbacks at step 11, train.py:41 in on_batch_end"
    assert lines[3] == "  ranks 0-1 wait in the collective dp.gradients.0 at step 12"
    assert "--hang-timeout 0 never" in on_command_line(lines[4])


def test_ranks_that_wait_for_one_another_are_told_so():
    verdict, ranks = verdict_of(WAITS, Report("collective", idle=T, collectives=("a", "b")))
    text = describe_hang(verdict, ranks, T)
    assert "rank 1 waits in one of the collectives a, b" in text
    assert "different collectives, or in one that another rank has left out" in text


def test_a_wait_for_a_rank_that_works_is_told():
    verdict, ranks = verdict_of(WAITS, WORKS)
    assert describe_wait(verdict, ranks, T) == (
        "rank 0 waits in the collective dp.gradients.0 at step 12, for 300 s by now, while rank 1 is saving at step 11."
    )


def test_ranks_that_wait_for_one_that_has_left_need_no_timeout():
    quiet, left = Report("collective", idle=2.0), Report("leaving", where="sys.exit(0) at train.py:12")
    ranks = {0: Seen(quiet), 1: Seen(left), 2: Seen(quiet)}
    verdict = left_alone(ranks, 1.5)
    assert (verdict.waiting, verdict.stuck) == ([0, 2], [1])
    lines = describe_left(verdict, ranks).splitlines()
    assert lines[1] == "  rank 1 did not come: at the end of its script, sys.exit(0) at train.py:12"
    assert lines[2] == "  ranks 0, 2 wait in a collective"


@pytest.mark.parametrize(
    "reports",
    [
        [Report("collective", idle=1.0), LEAVES],  # it may be about to end
        [Report("collective", idle=9.0), WORKS, LEAVES],  # the third one may be what is waited for
        [LEAVES, LEAVES],
        [WAITS, WAITS],
        [STUCK, LEAVES],  # work after training
    ],
)
def test_nobody_is_left_alone_before_that_is_sure(reports):
    assert left_alone({rank: Seen(report) for rank, report in enumerate(reports)}, 1.5) is None


# --- the watch over the board -------------------------------------------------------------------------------------


class Board:
    """The channel of rank 0 of two, whose other rank posts what the test says."""

    rank, size = 0, 2

    def __init__(self):
        self.other = b""
        self.reported = {}
        self.unanswered_s = 0.0

    def post(self, key, value):
        self.mine = value

    def read(self, key):
        return {0: self.mine, 1: self.other} if self.other else {0: self.mine}

    def failures(self):
        return self.reported


class Still:
    """No sign of life."""

    def look(self):
        return Signs()

    def forget(self):
        pass


class Standing:
    """A rank that stands where the test says."""

    def __init__(self, report):
        self.report, self.begun_anew = report, 0

    def look(self, unanswered=0.0):
        return self.report

    def went_on(self):
        self.begun_anew += 1


def watching(report=WAITS, timeout=T, patience=0.0):
    board, seconds, found, rank = Board(), [0.0], [], Standing(report)
    watch = HangWatch(
        board,
        rank,
        timeout,
        lambda text, show: found.append(text),
        patience_with_silent=lambda: patience,
        now=0.0,
    )
    return watch, board, seconds, found, rank


def look_for(watch, seconds, duration, each=1.0, before=lambda: None):
    for _ in range(int(duration / each)):
        seconds[0] += each
        before()
        watch.look(seconds[0])


def test_a_rank_that_stops_posting_makes_the_job_hang():
    watch, board, seconds, found, rank = watching(WORKS)
    board.other = WORKS.encode(1)
    look_for(watch, seconds, 100)
    rank.report = WAITS
    look_for(watch, seconds, 20)
    assert found == []
    look_for(watch, seconds, 200)
    assert "rank 1 gave no sign of life" in found[0]
    assert watch.ends_job


def test_an_elastic_job_leaves_silent_ranks_to_its_launcher_for_a_while():
    watch, board, seconds, found, rank = watching(patience=60.0)
    board.other = WORKS.encode(1)
    look_for(watch, seconds, 300)
    assert found == []
    rank.report = replace(WAITS, idle=T + 60)
    look_for(watch, seconds, 2)
    assert "rank 1 gave no sign of life" in found[0]


def test_an_elastic_job_ends_where_a_rank_that_lives_does_not_come():
    watch, board, seconds, found, _ = watching(patience=60.0)
    beats = itertools.count()

    def post():
        board.other = STUCK.encode(next(beats))

    look_for(watch, seconds, 40, before=post)
    assert "rank 1 did not come: in callbacks" in found[0]


def test_a_rank_that_posts_that_it_works_does_not(capsys):
    watch, board, seconds, found, _ = watching()
    beats = itertools.count()

    def post():
        board.other = WORKS.encode(next(beats))

    look_for(watch, seconds, 2000, before=post)
    assert found == []
    assert capsys.readouterr().err.count("while rank 1 is saving at step 11.") == 1


def test_a_rank_that_has_left_ends_the_wait_of_the_others():
    watch, board, seconds, found, _ = watching(Report("collective", "step", 3, idle=5.0))
    board.other = Report("leaving").encode(1)
    look_for(watch, seconds, 3)
    assert len(found) >= 1
    assert "rank 1 did not come: at the end of its script" in found[0]


def test_a_change_is_posted_at_once():
    watch, board, seconds, _, rank = watching(WORKS)
    look_for(watch, seconds, 5)
    rank.report = Report("leaving")
    look_for(watch, seconds, 1)
    assert Report.decode(board.mine).state == "leaving"


@pytest.mark.parametrize(("timeout", "pause"), [(T, 1000.0), (6.0, 5.5)])
def test_a_machine_that_stood_still_begins_anew(timeout, pause):
    watch, board, seconds, found, rank = watching(replace(WAITS, idle=timeout), timeout)
    beats = itertools.count()

    def post():
        board.other = WORKS.encode(next(beats))

    look_for(watch, seconds, 10, before=post)
    seconds[0] += pause
    look_for(watch, seconds, 2.0, 0.5)
    assert (found, rank.begun_anew) == ([], 1)


@pytest.mark.parametrize(
    ("report", "ends"),
    [
        (WAITS, True),
        (replace(WAITS, state="exchange"), True),  # with the store that does not answer
        (STUCK, False),
        (LEAVES, False),
        (replace(WAITS, idle=9.0), False),
    ],
)
def test_a_rank_that_waits_and_cannot_reach_the_others_ends(report, ends):
    watch, board, seconds, found, _ = watching(report)
    board.other = WORKS.encode(1)
    look_for(watch, seconds, 5)

    def unreachable(*args):
        raise LaunchError("Horovod's store at 10.0.0.1:4000 does not answer (timed out).")

    board.post = board.read = unreachable
    look_for(watch, seconds, Rhythm(T, 2, 0).silence)
    assert found == []
    look_for(watch, seconds, 2 * T / 10)
    assert (len(found) > 0, watch.ends_job) == (ends, ends)
    assert not ends or "at step 12, and has been cut off from the others for 23" in found[0]
    assert not ends or "store at 10.0.0.1:4000 does not answer" in found[0]


class NoAnswer(Board):
    """The same over a store that has no answer after three seconds for each look and each post."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.is_cut = seconds, False

    def ask(self):
        if self.is_cut:
            self.seconds[0] += 1.5
            self.unanswered_s += 1.5
            raise LaunchError("Horovod's store at 10.0.0.1:4000 does not answer (timed out).")

    def post(self, key, value):
        self.ask()
        super().post(key, value)

    def failures(self):
        with contextlib.suppress(LaunchError):
            self.ask()
        return {}


def test_a_rank_that_is_cut_off_counts_seconds_and_not_looks(monkeypatch):
    """Looks that take long are few."""
    seconds, found = [0.0], []
    board = NoAnswer(seconds)
    clock, waits = (lambda: seconds[0]), Position("collective", None, None, "train.py:1 in <module>", ("dp.gradients",))
    progress = ProgressWatch(Activity(), 5.0, 3600.0, locate=lambda: waits, signs=Still(), clock=clock)
    watch = HangWatch(board, progress, 5.0, lambda text, show: found.append((seconds[0], text)), now=0.0)
    monkeypatch.setattr(hang.watch, "time", SimpleNamespace(monotonic=clock, sleep=lambda seconds: None))
    while not found and seconds[0] < 60.0:
        seconds[0] += 0.5
        board.is_cut = seconds[0] > 2.0
        board.failures()
        watch.look(seconds[0])
    when, text = found[0]
    assert 7.0 <= when < 10.0, "within three seconds of the timeout"
    assert "has been cut off from the others for" in text


def test_a_channel_that_answers_again_is_no_reason_to_end():
    watch, board, seconds, found, _ = watching()
    post, beats = board.post, itertools.count()

    def now_and_then(key, value):
        if seconds[0] % 50 < 40:
            raise LaunchError("Horovod's store at 10.0.0.1:4000 does not answer (timed out).")
        board.other = WORKS.encode(next(beats))
        post(key, value)

    board.post = now_and_then
    look_for(watch, seconds, 5 * T)
    assert found == []


def test_the_lowest_rank_that_waits_speaks():
    watch, board, seconds, found, _ = watching()
    beats = itertools.count()
    board.reported = {1: "hang: found"}

    def post():
        board.other = WAITS.encode(next(beats))

    look_for(watch, seconds, 60, before=post)
    assert found == []
    board.reported = {}
    look_for(watch, seconds, 60, before=post)
    assert found


def test_the_store_is_not_overrun():
    for size in (8, 64, 512, 4096):
        a_second = sum(size / Rhythm(T, size, rank).reading(alert=True) for rank in range(size))
        assert a_second < 5_000, size
    assert Rhythm(T, 512, 0).reading(alert=True) < 2.0
