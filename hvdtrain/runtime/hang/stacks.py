"""Where each thread of this process stands, shown on standard error."""

import contextlib
import faulthandler
import signal
import sys
import threading
import traceback

from hvdtrain.runtime.terminal import say

HANG = "hang: "
"""How the failure report of a rank begins that ends a job which hangs."""


def show_own_stacks(rank: int) -> None:
    """Write where each Python thread of this rank stands."""
    say(f"hvdtrain: rank {rank} stands at\n{thread_stacks().rstrip()}")


def thread_stacks() -> str:
    """Return the stack of every Python thread but our own watchdogs, the main thread's last."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread()
    texts = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda item: item[0] == main.ident):
        thread = threads.get(ident)
        if thread is None or not thread.name.startswith("hvdtrain-"):
            name = f"thread {ident}" if thread is None else thread.name
            texts.append(f"{name}:\n" + "".join(traceback.format_stack(frame)))
    return "".join(texts)


def show_stacks_on_quit() -> None:
    """Have SIGQUIT show where each thread stands, also in C code that holds Python's lock; unless it is handled.

    A shell starts jobs in the background with the signal ignored.
    """
    if signal.getsignal(signal.SIGQUIT) in (signal.SIG_DFL, signal.SIG_IGN):
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):  # no standard error with a number
            faulthandler.register(signal.SIGQUIT, all_threads=True)
