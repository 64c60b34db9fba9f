"""Noting that the user's script leaves by `sys.exit`, which Python tells neither `sys.excepthook` nor `atexit`."""

import builtins
import dis
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from hvdtrain.runtime.failures import EXIT_FAILURE, ScriptExit

UNCLEAR = "The exit by which this script left hides its code; sys.exit(n), with n other than 0, ends the job at once."
"""What a rank adds where it waits for the others after such an exit."""


class ExitWatch:
    """Wraps `sys.exit`, `exit` and `quit`, in the main thread of a running script.

    Of `raise SystemExit(…)`, and of an `exit` that was imported from `sys` before, it sees no more than that the
    script did not return (`unclear`).
    """

    def __init__(self) -> None:
        self._script = _outermost(sys._getframe())
        self._last: tuple[object, str] | None = None
        self._wrapped: list[tuple[Any, str, Any]] = []

    def start(self) -> None:
        """Wrap them."""
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            leave = getattr(module, name, None)
            if leave is not None:
                self._wrapped.append((module, name, leave))
                setattr(module, name, self._noting(leave))

    def stop(self) -> None:
        """Put back what was there."""
        for module, name, leave in self._wrapped:
            setattr(module, name, leave)
        self._wrapped.clear()

    def found(self) -> ScriptExit | None:
        """Return the exit that ended the script, at its end; None where its code is 0, or it ended otherwise."""
        if self._last is None or _has_returned(self._script):
            return None
        status, where = self._last
        code = status if isinstance(status, int) else EXIT_FAILURE
        return None if status is None or code == 0 else ScriptExit(code, where)

    @property
    def described(self) -> str:
        """The exit that ended the script, whatever its code, "sys.exit(0) at train.py:12"; empty if there was none."""
        if self._last is None or _has_returned(self._script):
            return ""
        return f"sys.exit({self._last[0]!r}) at {self._last[1]}"

    @property
    def unclear(self) -> bool:
        """Whether the script, at its end, was left by an exception of which nothing more is known."""
        return self._last is None and not _has_returned(self._script)

    def _noting(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def noting(status: object = None, /) -> Any:
            if threading.current_thread() is threading.main_thread():
                caller = sys._getframe(1)
                self._last = status, f"{caller.f_code.co_filename}:{caller.f_lineno}"
            return leave(status)

        return noting


def _outermost(frame: FrameType) -> FrameType:
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType) -> bool:
    """Tell whether a frame that has ended did so by returning, and not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
