"""The end of a rank's script: ranks leave together, and an exit code other than 0 ends the job."""

import builtins
import dis
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from hvdtrain.runtime.control.channel import ControlChannel, name_ranks
from hvdtrain.runtime.failures import EXIT_FAILURE, ScriptExit
from hvdtrain.runtime.logs import LOGGER

PATIENCE_S = 3600.0
"""A rank that saves a large model to a slow disk is still at work; one that fails or is gone ends the job at once."""

NOTICE_S = 60.0


def leave_together(control: ControlChannel, *, patience: float = PATIENCE_S, notice: float = NOTICE_S) -> None:
    """Wait for all ranks.

    Args:
        patience: seconds to wait.
        notice: seconds after which one of those that wait says for whom, and again after twice as many.

    Raises:
        LaunchError: a rank did not come; it is named.
    """
    begin, due = time.monotonic(), notice

    def say_for_whom(missing: Sequence[int]) -> None:
        nonlocal due
        waited = time.monotonic() - begin
        if waited < due:
            return
        due *= 2
        if control.rank == min(set(range(control.size)) - set(missing), default=0):
            LOGGER.warning(
                f"rank {control.rank} is done and has waited {waited:.0f} s for {name_ranks(missing)}: still at work, "
                "or in an exchange that needs a rank which is done."
            )

    control.barrier(patience, on_wait=say_for_whom)


class ExitWatch:
    """Wraps `sys.exit`, `exit` and `quit`, in the main thread of a running script.

    Of `raise SystemExit(…)`, and of an `exit` that was imported from `sys` before, it sees nothing.
    """

    def __init__(self) -> None:
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
        self._script = frame
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

    def _noting(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        def noting(status: object = None, /) -> Any:
            if threading.current_thread() is threading.main_thread():
                caller = sys._getframe(1)
                self._last = status, f"{caller.f_code.co_filename}:{caller.f_lineno}"
            return leave(status)

        return noting


def _has_returned(frame: FrameType) -> bool:
    """Return whether a frame that has ended did so by returning, and not by an exception."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN")
