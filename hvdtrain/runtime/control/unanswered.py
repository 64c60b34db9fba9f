"""Time that requests of the channel take without getting an answer."""

import contextlib
import time
from collections.abc import Iterator

_LONGEST_S = 5.0
"""What one request counts at most: each gives up after a second or two, unless the whole process stood still."""


class UnansweredTime:
    """Adds up the seconds of requests that failed."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Context of a request, whose seconds count where it raises."""
        begun = time.monotonic()
        try:
            yield
        except Exception:
            self.seconds += min(time.monotonic() - begun, _LONGEST_S)
            raise
