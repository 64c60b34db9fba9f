"""A training that is to stop: on a signal to any rank, all ranks save after the same step and end.

The step is agreed on over the status board, without a collective and at no cost to the steps before it. A thread of the
rank that gets the signal posts so. On every rank such a thread then posts the last step that has begun, and lets no
further one begin until all ranks have posted. The step after the last one that any rank has begun is the last for all.
"""

import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import ControlChannel, end_process, name_ranks
from hvdtrain.runtime.logs import LOGGER

EXIT_REQUEUE = 75
"""The run was stopped by SIGTERM or SIGUSR1 and can go on: EX_TEMPFAIL of sysexits.h, "try again later"."""
EXIT_INTERRUPTED = 130
"""The run was stopped by Ctrl-C, SIGINT."""

_ASKED_A_SECOND = 250
"""To the store of horovodrun, of all ranks together, while they wait for a signal."""


def code_of(number: int) -> int:
    """Return the exit code of a process that the signal `number` stops in order."""
    return EXIT_INTERRUPTED if number == signal.SIGINT else EXIT_REQUEUE


class Stopped(SystemExit):
    """The training was saved and stopped, on every rank; ends the process with the code of the signal."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class StopAgreement:
    """Context of a training in which all ranks agree on the step after which they stop; every rank opens it.

    Args:
        control: the channel between the ranks.
        name: of this training, the same on every rank and new for each.
        begun: finished steps at its beginning.
        grace: seconds from the signal until this process ends, saved or not.
        trains: whether this rank takes steps; one that serves others asks them to stop.
        ranks: how many ranks take steps, from rank 0 on; None: all.
        end: ends this process, with an exit code.
    """

    def __init__(
        self,
        control: ControlChannel,
        name: str,
        begun: int,
        *,
        grace: float,
        trains: bool = True,
        ranks: int | None = None,
        end: Callable[[int], Any] = end_process,
    ) -> None:
        self._control = control
        self._asked_key, self._begun_key = f"stop/{name}/asked", f"stop/{name}/begun"
        self._begun = begun
        self._grace = grace
        self._trains = trains
        self._ranks = control.size if ranks is None else ranks
        self._end = end
        self._interval = max(0.25, _requests(control.size) / _ASKED_A_SECOND)
        self._changed = threading.Condition()
        self._asked, self._closed = threading.Event(), threading.Event()
        self._frozen = False
        self._signal: int | None = None
        self.asked_here: int | None = None
        """The first signal that this rank itself got."""
        self._stop: int | None = None
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-stopping", daemon=True)

    def __enter__(self) -> "StopAgreement":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._asked.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout=2.0)

    @property
    def requested(self) -> int | None:
        """The signal that this rank got, or that another one did; None while there was none."""
        return self._signal

    def request(self, number: int) -> None:
        """Ask all ranks to stop, because of the signal `number`; returns at once."""
        self.asked_here = self.asked_here or number
        self._signal = self._signal or number
        self._asked.set()

    def begin(self, step: int) -> bool:
        """Note that `step` begins, and tell whether it is the last; waits while ranks agree on which is.

        Of steps that are taken in one call, it is the last one.
        """
        with self._changed:
            while self._frozen and self._stop is None and not self._closed.is_set():
                self._changed.wait(1.0)
            self._begun = step
            stops = self._stop is not None and step >= self._stop
        if stops and self._control.rank == 0:
            name = signal.Signals(self._signal or signal.SIGTERM).name
            LOGGER.info(f"{name}: all ranks stop after step {step}, to save it.")
        return stops

    def stopped(self) -> Stopped:
        """Return the exception that ends this process, once the last step is saved."""
        return Stopped(code_of(self._signal or signal.SIGTERM))

    def _watch(self) -> None:
        """Wait until a rank asks, agree on the step, and end this process when the time of grace is over."""
        interval = self._interval if self._control.size > 1 else None
        while not self._asked.wait(interval) and not self._others_ask():
            continue
        deadline = time.monotonic() + self._grace
        if not self._closed.is_set() and not self._agree(deadline):
            return
        if not self._closed.wait(max(0.0, deadline - time.monotonic())):
            self._give_up(f"the last step, {self._stop}, was not reached and saved.")

    def _others_ask(self) -> bool:
        """Tell whether another rank asks, and take over its signal."""
        for text in self._read(self._asked_key).values():
            self._signal = self._signal or int(text)
        return self._signal is not None

    def _agree(self, deadline: float) -> bool:
        """Find the last step; return whether this process is to end if that takes too long."""
        with self._changed:
            self._frozen = True
            begun, asked = self._begun, self._signal or signal.SIGTERM
        posts = {self._asked_key: str(int(asked))}
        if self._trains:
            posts[self._begun_key] = f"{begun} {int(asked)}"
        if not self._post(posts, deadline) or not self._trains:
            return False
        everyone = self._posts(deadline)
        if everyone is None:
            return False
        with self._changed:
            self._stop = max(int(text.split()[0]) for text in everyone.values()) + 1
            signals = {int(text.split()[1]) for text in everyone.values()}
            self._signal = min(signals)  # SIGINT before all others
            self._changed.notify_all()
        return True

    def _post(self, posts: Mapping[str, str], deadline: float) -> bool:
        """Post these, again and again while the board does not answer; return whether it has taken them."""
        pause = max(0.02, self._control.size / _ASKED_A_SECOND)
        while not self._closed.is_set() and not self._control.failures():
            try:
                for key, text in posts.items():
                    self._control.post(key, text.encode())
                return True
            except LaunchError as error:
                if time.monotonic() > deadline:
                    self._give_up(f"the other ranks could not be told. {error}")
                    return False
            self._closed.wait(pause)
        return False

    def _posts(self, deadline: float) -> Mapping[int, bytes] | None:
        """Return what each rank has posted; None if the training ended before, or a rank failed."""
        pause = max(0.02, _requests(self._control.size) / _ASKED_A_SECOND / 10)
        while not self._closed.is_set() and not self._control.failures():
            posts = self._read(self._begun_key)
            missing = set(range(self._ranks)) - posts.keys()
            if not missing:
                return posts
            if time.monotonic() > deadline:
                self._give_up(f"{name_ranks(missing)} did not say which step it is at.")
                return None
            self._closed.wait(pause)
        return None

    def _read(self, key: str) -> Mapping[int, bytes]:
        try:
            return self._control.read(key)
        except LaunchError:
            return {}

    def _give_up(self, why: str) -> None:
        name = signal.Signals(self._signal or signal.SIGTERM).name
        LOGGER.warning(f"{name} was {self._grace:g} s ago, and {why} The checkpoints from before stay.")
        self._end(code_of(self._signal or signal.SIGTERM))
        self._closed.set()


def _requests(ranks: int) -> int:
    """Return how many requests a look of all ranks at the board is: one for each pair of few, two for each of many."""
    return min(ranks**2, max(256, 2 * ranks))
