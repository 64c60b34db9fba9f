"""Wait for a condition, never for a time: how long something takes depends on what else the machine does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, seconds: float = 30.0) -> None:
    """Return once `condition()` is true; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.02)
