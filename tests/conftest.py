"""Fixtures of all tests."""

import signal

import pytest


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Let Ctrl-C interrupt, as in the foreground.

    A shell starts background jobs with SIGINT ignored, and so it stays in every process that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
