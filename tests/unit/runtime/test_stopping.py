"""On which step ranks agree to stop, when one of them gets a signal."""

import re
import signal
import threading
import time

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.stopping import StopAgreement, Stopped
from tests.unit.threaded_ranks import as_ranks, on_threads

TOTAL = 10_000


class Rank:
    """A rank that takes steps of some length until it is to stop."""

    def __init__(self, channel, together=None, *, asks_at=None, number=signal.SIGTERM, pause=0.0, at_once=1, **options):
        self.ended = []
        self.last = 0
        options = {"grace": 20.0, "end": self.ended.append, **options}
        with StopAgreement(channel, "1", 0, **options) as agreement:
            for step in range(at_once, TOTAL, at_once):
                stops = agreement.begin(step)
                if together is not None:
                    together.wait(20)  # the exchange of the step
                time.sleep(pause)
                self.last = step
                if step == asks_at:
                    agreement.request(number)
                if stops or self.ended:
                    break
            self.code = agreement.stopped().exit_code


@pytest.mark.parametrize("who", [{0}, {2}, {0, 1, 2}])
def test_all_stop_after_the_same_step_that_none_has_to_skip(capsys, who):
    barrier = threading.Barrier(3)

    def body(channel):
        return Rank(channel, barrier, asks_at=20 if channel.rank in who else None, pause=0.002)

    ranks = as_ranks(3, body)
    assert len({rank.last for rank in ranks}) == 1
    assert 20 < ranks[0].last < TOTAL - 1
    assert [rank.code for rank in ranks] == [75] * 3
    assert f"hvdtrain: SIGTERM: all ranks stop after step {ranks[0].last}, to save it." in capsys.readouterr().err


def test_a_signal_on_one_of_many_ranks_stops_all(capsys):
    """They hear of it by what rank 0 collects."""
    barrier = threading.Barrier(20)
    ranks = as_ranks(20, lambda channel: Rank(channel, barrier, asks_at=5 if channel.rank == 13 else None, pause=0.05))
    assert len({rank.last for rank in ranks}) == 1
    assert 5 < ranks[0].last < TOTAL - 1
    assert [rank.code for rank in ranks] == [75] * 20


@pytest.mark.parametrize("at_once", [4, 16])
def test_steps_that_are_one_call_are_all_taken_before_the_stop(capsys, at_once):
    ranks = as_ranks(
        2, lambda channel: Rank(channel, asks_at=80 if channel.rank else None, pause=0.01, at_once=at_once)
    )
    assert ranks[0].last == ranks[1].last > 80
    assert ranks[0].last % at_once == 0
    assert f"all ranks stop after step {ranks[0].last}, to save it." in capsys.readouterr().err


@pytest.mark.extended  # 5 s of pauses
def test_ranks_that_exchange_nothing_for_a_while_stop_after_the_step_of_the_fastest():
    ranks = as_ranks(
        2, lambda channel: Rank(channel, asks_at=5 if channel.rank else None, pause=0.001 + 0.02 * channel.rank)
    )
    assert ranks[0].last == ranks[1].last > 6


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_process_that_is_alone_stops_after_the_next_step(number, code):
    rank = Rank(ControlChannel(), asks_at=3, number=number, pause=0.05)
    assert (rank.code, rank.ended) == (code, [])
    assert rank.last <= 6


def test_the_exception_ends_a_script_with_the_code():
    with pytest.raises(SystemExit) as raised:
        raise Stopped(75)
    assert raised.value.code == 75


def test_a_rank_that_does_not_answer_is_named_when_the_time_of_grace_is_over(capsys):
    def body(channel):
        if channel.rank == 1:
            time.sleep(2.0)
            return None
        return Rank(channel, asks_at=2, grace=0.5)

    rank = as_ranks(2, body)[0]
    assert rank.ended == [75]
    told = capsys.readouterr().err
    assert (
        "SIGTERM was 0.5 s ago, and rank 1 did not say which step it is at. The checkpoints from before stay." in told
    )


class StallingChannel(ControlChannel):
    """A board that does not answer so many times; None: never again."""

    def __init__(self, times):
        super().__init__()
        self._left = times

    def post(self, key, value):
        if self._left is None or self._left > 0:
            self._left = self._left and self._left - 1
            raise LaunchError("Horovod's store at 10.0.0.1:4000 does not answer (timed out).")
        super().post(key, value)


@pytest.mark.parametrize("times", [1, 2, 4])
def test_a_board_that_stalls_is_asked_again(times):
    """A stall of a second or more, as of a busy horovodrun, costs no checkpoint."""
    rank = on_threads(1, lambda _: Rank(StallingChannel(times), asks_at=3, grace=120.0, pause=0.01))[0]
    assert (rank.code, rank.ended) == (75, [])
    assert rank.last < TOTAL - 1


def test_a_board_that_is_gone_ends_the_process_when_the_time_of_grace_is_over(capsys):
    rank = on_threads(1, lambda _: Rank(StallingChannel(None), asks_at=3, grace=0.5, pause=0.01))[0]
    assert rank.ended == [75]
    told = "SIGTERM was 0.5 s ago, and the other ranks could not be told. Horovod's store at 10.0.0.1:4000 does not"
    assert told in capsys.readouterr().err


def test_a_step_that_takes_longer_than_the_time_of_grace_ends_the_process(capsys):
    rank = Rank(ControlChannel(), asks_at=1, grace=0.2, pause=0.4)
    assert rank.ended == [75]
    assert re.search(r"the last step, \d, was not reached and saved", capsys.readouterr().err)


def test_a_training_that_ends_meanwhile_leaves_no_thread():
    with StopAgreement(ControlChannel(), "1", 0, grace=9.0) as agreement:
        agreement.begin(1)
    agreement.request(signal.SIGTERM)
    assert "hvdtrain-stopping" not in [thread.name for thread in threading.enumerate()]


def test_a_rank_that_serves_asks_those_that_train():
    asked = threading.Event()

    def body(channel):
        if channel.rank == 0:
            rank = Rank(channel, ranks=1, pause=0.002)
            asked.set()
            return rank
        with StopAgreement(channel, "1", 0, grace=20.0, trains=False) as agreement:
            agreement.request(signal.SIGTERM)
            assert asked.wait(20)
        return None

    assert 0 < as_ranks(2, body)[0].last < TOTAL - 1
