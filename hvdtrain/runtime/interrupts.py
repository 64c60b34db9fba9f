"""Ctrl-C, SIGTERM by which launchers pass it on, SIGTERM and SIGUSR1 of a scheduler: the process ends in order.

A training that saves checkpoints stops after a step that all ranks agree on; everything else says how to go on, and
ends at once. Launchers end the ranks one to five seconds after the signal, and a rank may be within a collective all
that time, where Python calls no handler: in a job of several ranks a thread acts on signals.
"""

import atexit
import os
import re
import signal
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
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


def stops_already(number: int, frame: FrameType | None) -> None:
    """Do nothing: the process is about to end with a code of its own."""


def _ignore_to_the_end(number: int) -> None:
    if signal.getsignal(number) is stops_already:  # no longer a handler as Python ends
        signal.signal(number, signal.SIG_IGN)


_FREE = (signal.SIG_DFL, signal.default_int_handler, stops_already)


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
        self._last: frozenset[signal.Signals] = frozenset()
        """The signals that were still this context's at its end."""
        self._first: int | None = None

    def __enter__(self) -> "InterruptWatch":
        if threading.current_thread() is not threading.main_thread():
            return self
        # Signals that nobody handles otherwise; one that is ignored, as in the background, stays so.
        free = [each for each in SIGNALS if signal.getsignal(each) in _FREE]
        if not free:
            return self
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in free}
        self._leave_forked_processes()
        self._thread = threading.Thread(target=self._watch, name="hvdtrain-interrupts", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if not self._before:
            return
        # Launchers send SIGTERM once more to a process that is about to end with its own code.
        told = SIGNALS[1:] if isinstance(error, Stopped) else ()
        self._leave(dict.fromkeys(told, stops_already))
        for number in told:
            atexit.register(_ignore_to_the_end, number)
        self._before = {}
        self._write.close()
        self._thread.join()  # what has arrived by now is acted on

    def _leave_forked_processes(self) -> None:
        """Let processes that are forked from now on leave this context; a signal to one that has yet to do so waits.

        They would not end by SIGTERM, and their parent would take it for its own.
        """
        watch, masks = weakref.ref(self), threading.local()  # a callback is registered for good

        def hold() -> None:
            here = watch()
            masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, here._before if here else ())

        def go_on() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

        def leave() -> None:
            if here := watch():
                here._leave({})
            go_on()

        os.register_at_fork(before=hold, after_in_parent=go_on, after_in_child=leave)

    def _leave(self, handlers: Mapping[signal.Signals, Any]) -> None:
        """Put back what was there before, or `handlers`; what the script has set meanwhile stays."""
        if not self._before:
            return
        self._last = frozenset(filter(self._is_ours, self._before))
        for number in self._last:
            signal.signal(number, handlers.get(number, self._before[number]))
        meanwhile = signal.set_wakeup_fd(self._wakeup_before)
        if meanwhile != self._write.fileno():
            signal.set_wakeup_fd(meanwhile)

    def _is_ours(self, number: int) -> bool:
        return number in self._last or signal.getsignal(number) == self._handle

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt in a process that is alone; else the thread sees the signal."""
        if self._place().size == 1 and number == signal.SIGINT:
            self._handled_interrupts += 1
            if self._handled_interrupts > 1 or not self._stop(number):
                raise Interrupted(self._message())

    def _watch(self) -> None:
        """Act on this context's signals: Python tells the descriptor of those with handlers of the script, too."""
        with self._read:
            while numbers := self._read.recv(16):
                for number in numbers:
                    if self._is_ours(number):
                        self._arrived(number)
                    elif self._wakeup_before >= 0:
                        with suppress(OSError):  # as Python writes there: an event loop calls its handlers
                            os.write(self._wakeup_before, bytes([number]))

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
