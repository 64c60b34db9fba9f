"""Signals that end a verb which has started other programs."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def ended_by_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit (128 + the signal) within, so that what was started is ended first."""
    before = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
