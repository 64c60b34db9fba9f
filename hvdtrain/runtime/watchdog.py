"""Looks for the failure of other ranks, also while this one hangs."""

import threading

from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.failures import FailurePolicy

_LOOKS_A_SECOND = 500
"""Looks of all ranks together. On 2 cores the store of horovodrun answered 2,900 requests a second."""


class Watchdog:
    """A thread that looks for failure reports of other ranks, about once a second.

    A rank that failed ends the job through the launcher. Where that does not reach this process, which may
    hang in a collective for ever, the policy decides what becomes of it. It does nothing in a job of one.
    """

    def __init__(self, control: ControlChannel, policy: FailurePolicy, *, interval: float = 1.0) -> None:
        """Watch over ``control``.

        Args:
            control: the channel over which the other ranks report.
            policy: what follows from their failure.
            interval: seconds between two looks; more in a job of many ranks.
        """
        self._control = control
        self._policy = policy
        self._interval = max(interval, control.size / _LOOKS_A_SECOND)
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
                self._policy.others_failed(self._control, sorted(failed), self._stopped)
                return
