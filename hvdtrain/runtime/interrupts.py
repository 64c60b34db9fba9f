"""Ctrl-C, SIGTERM by which launchers pass it on, SIGTERM and SIGUSR1 of a scheduler: the process ends in order.

A training that saves checkpoints stops after a step that all ranks agree on; everything else says how to go on, and
ends at once. Launchers end the ranks one to five seconds after the signal, and a rank may be within a collective all
that time, where Python calls no handler: in a job of several ranks a thread acts on signals.
"""

import re
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.logs import LOGGER, on_terminal
from hvdtrain.runtime.stopping import Stopped, code_of

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_PACKAGE = str(Path(__file__).parents[1])
INSTALLED = re.compile(rf"/(site-packages|dist-packages|lib/python3[^/]*)/|^{re.escape(_PACKAGE)}/|^<frozen")
_SHOW_CURSOR = "\x1b[?25h"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, with a message for the user."""


def show_interrupt(trace: TracebackType | None) -> None:
    """Show the KeyboardInterrupt that ends a script as Python does, without the frames of installed packages."""
    own = [frame for frame in traceback.extract_tb(trace) if not INSTALLED.search(frame.filename)]
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(own), "KeyboardInterrupt\n"]
    sys.stderr.write("".join(lines))


class InterruptWatch:
    """Context in which the first Ctrl-C ends this process in order, and a second one at once.

    A training under way is asked to save and stop. Without one, a process that is alone gets Python's
    KeyboardInterrupt; of several ranks, the first one shows the message and all end.

    Args:
        place: returns this process's place in the job; in an elastic one it changes.
        message: what is shown.
        failed: whether another rank has failed: the launcher then ends this one by the same signal.
        end: ends this process, with an exit code.
        stop: asks a training under way to save and stop because of a signal, and tells whether there is one.
    """

    def __init__(
        self,
        place: Callable[[], Environment],
        message: Callable[[], str],
        failed: Callable[[], bool] = lambda: False,
        end: Callable[[int], Any] = end_process,
        stop: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self._stop = stop
        self._stopping = False
        self._handled_interrupts = 0
        self._place = place
        self._message = message
        self._failed = failed
        self._end = end
        self._before: dict[signal.Signals, Any] = {}
        self._first: int | None = None

    def __enter__(self) -> "InterruptWatch":
        if threading.current_thread() is not threading.main_thread():
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        # Signals that nobody handles otherwise; one that is ignored, as in the background, stays so.
        free = [each for each in SIGNALS if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler)]
        self._before = {number: signal.signal(number, self._handle) for number in free}
        threading.Thread(target=self._watch, name="hvdtrain-interrupts", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if not self._before:
            return
        for number, handler in self._before.items():
            # Launchers send SIGTERM once more to a process that is about to end with its own code.
            ends = isinstance(error, Stopped) and number != signal.SIGINT
            signal.signal(number, signal.SIG_IGN if ends else handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._write.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in a process that is alone; else the thread sees the signal."""
        if self._place().size == 1 and number == signal.SIGINT:
            self._handled_interrupts += 1
            if self._handled_interrupts > 1 or not self._stop(number):
                raise Interrupted(self._message())

    def _watch(self) -> None:
        while True:
            try:
                numbers = self._read.recv(16)
            except OSError:
                return
            if not numbers:
                return
            for number in numbers:
                if number in SIGNALS:
                    self._arrived(number)

    def _arrived(self, number: int) -> None:
        again, self._first = self._first is not None, self._first or number
        if self._stopping and number != signal.SIGINT:
            return  # schedulers and launchers may each send it
        if not again and not self._failed() and self._stop(number):
            self._stopping = True
            return
        alone = self._place().size == 1
        if alone and number == signal.SIGINT and not again:
            return  # Python's main thread is interrupted
        if not again and self._place().rank == 0 and not self._failed():
            with suppress(Exception):
                if on_terminal(self._place()):
                    sys.stdout.write(_SHOW_CURSOR)
                LOGGER.info(self._message())
        self._end(code_of(number))
