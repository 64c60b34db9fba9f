"""How a failure ends the job: within seconds, and with the traceback of the rank that failed, shown once."""

import contextlib
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

from hvdtrain.config.errors import UserError
from hvdtrain.runtime.control.channel import ControlChannel, flush_output
from hvdtrain.runtime.launchers import Environment

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130

_REPORTED_CHARACTERS = 2000
"""The end of a traceback tells failures apart, and MPI sends a message of this size without a handshake."""


@dataclass(frozen=True)
class Grace:
    """How long, in seconds, a failing rank waits for the others before it ends the job."""

    consequence: float = 3.0
    """A rank whose error is only a consequence waits for the report of the cause."""
    same: float = 1.0
    """A rank above 0 waits for a lower rank to report the same error."""
    silent: float = 3.0
    """A rank that shows nothing lets the one that does end the job, which may first wait for ``same``."""
    output: float = 0.2
    """The launcher passes the last lines on before the end of the job cuts them off."""


def handle_failure(
    control: ControlChannel | None,
    environment: Environment | None,
    error: BaseException,
    *,
    stream: TextIO | None = None,
    grace: Grace | None = None,
) -> int:
    """Show ``error`` if this rank is the one to show it, and end the job.

    In a job of several ranks it does not return: `ControlChannel.abort` ends it. Alone, or before the channel
    is open (``control`` is None), it shows the error and returns the exit code; in the latter case leave by
    `control.end_process`, as a plain exit would wait for the other ranks in MPI_Finalize.

    Args:
        control: the channel to the other ranks, or None if it could not be opened.
        environment: this process's place, or None if it is not known.
        error: what ended the run.
        stream: where the error is shown; standard error by default.
        grace: how long to wait for the other ranks.

    Returns:
        The exit code: 2 for a UserError, 130 for KeyboardInterrupt, else 1.
    """
    text, code = _describe(error), exit_code(error)
    if control is None or control.size == 1:
        _show(text, error, environment, stream)
        return code
    grace = grace or Grace()
    if _shown_elsewhere(control, error, text[-_REPORTED_CHARACTERS:], grace):
        time.sleep(grace.silent)
    else:
        _show(text, error, environment, stream)
        time.sleep(grace.output)
    control.abort(code)


def exit_code(error: BaseException) -> int:
    """Return the exit code for a run that ended with ``error``."""
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE


def is_consequence(error: BaseException) -> bool:
    """Tell whether ``error`` is probably what another rank's failure looks like from here.

    Horovod raises HorovodInternalError, or TensorFlow an OpError with Horovod's message. Decided by name:
    neither may be installed.
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if "HorovodInternalError" in names or ("OpError" in names and "horovod" in str(error).lower()):
        return True
    return error.__cause__ is not None and is_consequence(error.__cause__)


def _shown_elsewhere(control: ControlChannel, error: BaseException, report: str, grace: Grace) -> bool:
    """Report this rank's error, and tell whether another rank shows it or its cause."""
    if is_consequence(error) and _wait(lambda: bool(control.failures()), grace.consequence):
        return True
    control.report_failure(report)

    def said_by_lower() -> bool:
        return any(rank < control.rank and text == report for rank, text in control.failures().items())

    return control.rank > 0 and _wait(said_by_lower, grace.same)


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    """Return whether ``condition`` came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


def _describe(error: BaseException) -> str:
    """Return what is shown of ``error``, the same on every rank that makes it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UserError):
        return str(error)
    return "".join(traceback.format_exception(error)).rstrip()


def _show(text: str, error: BaseException, environment: Environment | None, stream: TextIO | None) -> None:
    """Write it in one piece, so that the launcher does not mix it with other ranks' lines."""
    rank, size = (environment.rank, environment.size) if environment else (0, 1)
    here = f"rank {rank} ({environment.hostname})" if environment else ""
    if isinstance(error, KeyboardInterrupt):
        line = f"hvdtrain: {text}"
    elif isinstance(error, UserError):
        line = f"hvdtrain: error: {text}" + (f" [{here}]" if rank > 0 else "")
    else:
        line = (f"{here} failed:\n" if size > 1 else "") + text
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more
        (stream or sys.stderr).write(line + "\n")
    flush_output()
