"""Ends a process that hangs although another rank of its job has failed."""

import sys
import threading
from collections.abc import Callable

from hvdtrain.runtime.control.channel import ControlChannel, end_process, name_ranks

_LOOKS_A_SECOND = 500
"""Looks of all ranks together. On 2 cores the store of horovodrun answered 2,900 requests a second."""


class Watchdog:
    """A thread that looks for failure reports of other ranks, about once a second.

    A rank that failed ends the job through the launcher. Where that does not reach this process, which may
    hang in a collective for ever, the watchdog ends it after a time of grace. It does nothing in a job of one.
    """

    def __init__(
        self,
        control: ControlChannel,
        *,
        interval: float = 1.0,
        grace: float = 5.0,
        end: Callable[[int], object] = end_process,
    ) -> None:
        """Watch over ``control``.

        Args:
            control: the channel over which the other ranks report.
            interval: seconds between two looks; more in a job of many ranks.
            grace: seconds from the first report that this process has to end by itself.
            end: called with the exit code 1 to end this process.
        """
        self._control = control
        self._interval = max(interval, control.size / _LOOKS_A_SECOND)
        self._grace = grace
        self._end = end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch; once only."""
        if self._control.size > 1:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching, so that the channel can be closed; fine to call twice, or before the start."""
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            failed = self._control.failures()
            if failed:
                self._wait_and_end(sorted(failed))
                return

    def _wait_and_end(self, failed: list[int]) -> None:
        if self._stopped.wait(self._grace):
            return
        rank, seconds = self._control.rank, self._grace
        print(
            f"hvdtrain: rank {rank} still ran {seconds:g} s after {name_ranks(failed)} failed, and is ended.",
            file=sys.stderr,
        )
        self._end(1)
