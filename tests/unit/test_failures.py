import io
import time
from dataclasses import dataclass, field

import pytest

from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.control.local import LocalChannel
from hvdtrain.runtime.failures import Grace, handle_failure, is_consequence
from hvdtrain.runtime.watchdog import Watchdog
from tests.unit.threaded_ranks import as_ranks, place

QUICK = Grace(consequence=1.0, same=0.5, silent=0.0, output=0.0)


class HorovodInternalError(RuntimeError):
    """As Horovod names it."""


class OpError(Exception):
    """As TensorFlow names it."""


class UnknownError(OpError):
    """As TensorFlow names it."""


class Ended(Exception):
    """The job, by an abort that the test survives."""


@dataclass
class Ending:
    """A channel that notes how it is ended."""

    channel: ControlChannel
    reported: list[str] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.channel, name)

    def abort(self, code):
        raise Ended(code)


def fail(errors):
    """Let each rank fail with its error; return what each showed and its exit code."""

    def body(channel):
        shown = io.StringIO()
        channel.barrier(10)
        try:
            raise errors[channel.rank]
        except BaseException as error:
            with pytest.raises(Ended) as ended:
                handle_failure(Ending(channel), place(channel.rank, channel.size), error, stream=shown, grace=QUICK)
        return shown.getvalue(), ended.value.args[0]

    outcomes = as_ranks(len(errors), body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [shown for shown, _ in outcomes], [code for _, code in outcomes]


def test_the_cause_is_shown_and_its_consequences_are_not():
    errors = [HorovodInternalError("shut down"), ValueError("the cause"), UnknownError("Horovod has been shut down")]
    shown, codes = fail(errors)
    assert shown[0] == shown[2] == ""
    assert shown[1].startswith("rank 1 (host1) failed:\nTraceback")
    assert shown[1].endswith("ValueError: the cause\n")
    assert codes == [1, 1, 1]


def test_the_same_mistake_of_all_ranks_is_shown_by_rank_0_alone():
    shown, codes = fail([ConfigError("--batch 7 does not divide") for _ in range(3)])
    assert shown == ["hvdtrain: error: --batch 7 does not divide\n", "", ""]
    assert codes == [2, 2, 2]


def test_a_mistake_of_one_rank_names_it():
    shown, codes = fail([HorovodInternalError("x"), ConfigError("no such file")])
    assert shown == ["", "hvdtrain: error: no such file [rank 1 (host1)]\n"]
    assert codes == [1, 2]


def test_different_errors_are_all_shown():
    shown, _ = fail([ValueError("one"), ValueError("two")])
    assert "one" in shown[0]
    assert "two" in shown[1]


def test_consequences_without_a_cause_are_shown_once():
    shown, _ = fail([HorovodInternalError("lost")] + [HorovodInternalError("lost") for _ in range(2)])
    assert sum("lost" in text for text in shown) == 1


def test_an_interrupt_has_no_traceback():
    shown, codes = fail([KeyboardInterrupt(), KeyboardInterrupt()])
    assert shown == ["hvdtrain: interrupted\n", ""]
    assert codes == [130, 130]


@pytest.mark.parametrize("control", [LocalChannel(), None])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("bad"), 2, "hvdtrain: error: bad\n"),
        (KeyboardInterrupt(), 130, "hvdtrain: interrupted\n"),
        (ValueError("bug"), 1, "ValueError: bug\n"),
    ],
)
def test_alone_it_shows_the_error_and_returns_the_code(control, error, code, text, capsys):
    assert handle_failure(control, place(0, 1), error) == code
    assert capsys.readouterr().err == text


def test_a_place_that_is_not_known_is_not_named(capsys):
    assert handle_failure(None, None, ConfigError("bad")) == 2
    assert capsys.readouterr().err == "hvdtrain: error: bad\n"


def test_a_closed_stream_does_not_hide_the_exit_code():
    stream = io.StringIO()
    stream.close()
    assert handle_failure(None, place(0, 1), ValueError("x"), stream=stream) == 1


def test_consequences_are_told_by_name_and_message():
    wrapped = RuntimeError("in the callback")
    wrapped.__cause__ = HorovodInternalError("x")
    assert is_consequence(HorovodInternalError("x"))
    assert is_consequence(UnknownError("Horovod has been shut down"))
    assert is_consequence(wrapped)
    assert not is_consequence(UnknownError("matrix size-incompatible"))
    assert not is_consequence(ValueError("horovod is misspelt"))


def test_the_watchdog_ends_a_process_that_hangs_after_a_failure(capsys):
    ended = []

    def body(channel):
        if channel.rank == 1:
            return channel.report_failure("text")
        watchdog = Watchdog(channel, interval=0.05, grace=0.5, end=lambda code: ended.append((code, time.monotonic())))
        started = time.monotonic()
        watchdog.start()
        while not ended and time.monotonic() < started + 10:
            time.sleep(0.05)
        watchdog.stop()
        return ended[0][0], ended[0][1] - started > 0.5

    assert as_ranks(2, body) == [(1, True), None]
    assert "rank 0 still ran 0.5 s after rank 1 failed" in capsys.readouterr().err


def test_a_stopped_watchdog_ends_nothing():
    ended = []

    def body(channel):
        watchdog = Watchdog(channel, interval=0.02, grace=0.2, end=ended.append)
        watchdog.start()
        channel.barrier(10)
        if channel.rank == 0:
            channel.report_failure("text")
        time.sleep(0.1)
        watchdog.stop()
        watchdog.stop()
        time.sleep(0.3)

    assert as_ranks(2, body) == [None, None]
    assert ended == []


def test_a_watchdog_over_one_process_does_nothing():
    watchdog = Watchdog(LocalChannel())
    watchdog.start()
    watchdog.stop()
