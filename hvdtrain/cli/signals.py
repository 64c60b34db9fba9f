"""Signals that end a verb which has started other programs."""

import signal
from types import FrameType


def exit_by_exception() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit (with 128 + the signal), so that what was started is ended first."""
    signal.signal(signal.SIGTERM, _leave)
    signal.signal(signal.SIGHUP, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
