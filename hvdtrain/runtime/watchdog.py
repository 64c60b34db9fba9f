"""Looks for the failure of other ranks, also while this one hangs, and does what else is to be watched."""

import threading
import time
import traceback
from typing import Protocol

from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.failures import FailurePolicy
from hvdtrain.runtime.hang.position import HANG, show_own_stacks
from hvdtrain.runtime.logs import LOGGER

_LOOKS_A_SECOND = 500
"""Looks of all ranks together. On 2 cores the store of horovodrun answered 2,900 requests a second."""


class Watch(Protocol):
    """Something else that the watchdog looks at."""

    @property
    def ends_job(self) -> bool:
        """Whether it is about to end the job."""

    def look(self, now: float) -> None:
        """Look once, at the time `now` in seconds."""


class Watchdog:
    """A thread that looks for failure reports of other ranks, about once a second.

    A rank that failed ends the job through the launcher. Where that does not reach this process, which may
    hang in a collective for ever, the policy decides what becomes of it. It does nothing in a job of one.
    """

    def __init__(self, control: ControlChannel, policy: FailurePolicy, *, interval: float = 1.0) -> None:
        """Watch ``control`` every ``interval`` seconds, less often in a job of many ranks."""
        self._control = control
        self._policy = policy
        self._interval = max(interval, control.size / _LOOKS_A_SECOND)
        self._watches: tuple[Watch, ...] = ()
        self._changing = threading.Lock()
        """Held while `_watches` is replaced, by this thread or by one that adds or stops."""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-watchdog", daemon=True)

    def start(self) -> None:
        """Start to watch; once only."""
        if self._control.size > 1:
            self._thread.start()

    def add(self, watch: Watch, *, interval: float = 1.0) -> None:
        """Look at this as well: at once, then at least every `interval` seconds where the job is small."""
        self._interval = min(self._interval, max(interval, self._control.size / _LOOKS_A_SECOND))
        # What it posts tells others of this rank before anything can go wrong.
        if self._thread.is_alive() and not self._look_at(watch):
            return
        with self._changing:
            self._watches = (*self._watches, watch)

    def stop(self) -> None:
        """Stop watching, so that the channel can be closed; fine to call twice, or before the start.

        The watches are given up: one may still hold a frame of the last read of data, and with it an iterator that runs
        Python code, whose end Python waits for in vain once it is ending itself.
        """
        self._stopped.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            ends_job = any(watch.ends_job for watch in self._watches)
            self._thread.join(timeout=None if ends_job else 2.0)
        with self._changing:
            self._watches = ()

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            failed = self._control.failures()
            if failed:
                if any(text.startswith(HANG) for text in failed.values()):
                    show_own_stacks(self._control.rank)
                self._policy.others_failed(self._control, sorted(failed), self._stopped)
                return
            for watch in self._watches:
                if not self._look_at(watch):
                    with self._changing:
                        self._watches = tuple(each for each in self._watches if each is not watch)

    def _look_at(self, watch: Watch) -> bool:
        """Look once; return False if it failed, which must end neither the job nor the watch for failures."""
        try:
            watch.look(time.monotonic())
        except Exception:
            LOGGER.warning(f"{type(watch).__name__} watches no more:\n{traceback.format_exc()}")
            return False
        return True
