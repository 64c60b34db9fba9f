"""Verbs that start other programs end them when they are told to end."""

import signal

import pytest

from hvdtrain.cli.running import ended_by_exceptions


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_an_exception_within_and_what_it_was_afterwards(number):
    before = signal.getsignal(number)
    with pytest.raises(SystemExit) as ended, ended_by_exceptions():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number
    assert signal.getsignal(number) == before
