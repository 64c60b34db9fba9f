"""End the job after a failure within seconds, and show the failed rank's traceback once.

What follows from a failure is a `FailurePolicy`, which the link between the ranks holds. `FailFast` ends the job.
"""

import contextlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import FrameType
from typing import Protocol, TextIO, TypeAlias

from hvdtrain.config.errors import LaunchError, LoneRanksError, UserError, in_script
from hvdtrain.runtime.consequences import is_consequence, limit_reached
from hvdtrain.runtime.control.channel import ControlChannel, end_process, flush_output, name_ranks
from hvdtrain.runtime.hang.position import HANG
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.logs import say
from hvdtrain.runtime.stopping import EXIT_INTERRUPTED, EXIT_REQUEUE

EXIT_FAILURE = 1
EXIT_USER_ERROR = 2
EXIT_HANG = 124
"""The code of `timeout` of the coreutils: the job did not go on."""

_REPORTED_CHARACTERS = 2000
"""The end of a traceback tells failures apart, and MPI sends a message of this size without a handshake."""

_CUT_OFF = "cut-off"
"""Key on the status board of ranks whose error is only a consequence."""

_RANK_0_IS_GONE = "rank 0, which keeps the store of the job, is gone: killed, or its machine is gone."

_REQUESTS_A_SECOND = 2000
"""Of all ranks together to the store of horovodrun, which answered 2,900 on 2 cores."""


Wording: TypeAlias = Callable[[str], str]
"""Words the options in a message: `hvdtrain.config.errors.in_script` or `on_command_line`."""


class FailurePolicy(Protocol):
    """Reaction of a rank to its own failure and to those of others."""

    def fail(self, control: ControlChannel, environment: Environment, error: BaseException) -> int:
        """Act on this rank's own ``error``; where it returns, the process is to leave with the exit code returned."""

    def others_failed(self, control: ControlChannel, failed: Collection[int], stopped: threading.Event) -> None:
        """Act on the failure of other ranks, on the watchdog's thread; ``stopped`` is set when the link is closed."""

    def broken_link(self, control: ControlChannel, environment: Environment, text: str) -> None:
        """Act on another host that cannot be reached, on the watchdog's thread; `text` is for the user."""

    def hung(
        self, control: ControlChannel, environment: Environment, text: str, show_stacks: Callable[[], None]
    ) -> None:
        """Act on a job that hangs, on the watchdog's thread of a rank that waits; `text` is for the user."""


@dataclass(frozen=True)
class Grace:
    """Seconds that a rank waits for others before it ends the job or itself."""

    cause: float = 10.0
    """A rank that was cut off waits for the report of the cause: the rank that fails may have things to clean up."""
    same: float = 1.0
    """A rank above 0 waits for a lower rank to report the same error."""
    silent: float = 3.0
    """A rank that shows nothing lets the one that does end the job, which may first wait for ``same``."""
    output: float = 0.2
    """The launcher passes the last lines on before the end of the job cuts them off."""
    hanging: float = 5.0
    """A rank that has not failed is ended by the launcher, or else by itself: it may hang in a collective for ever."""
    stacks: float = 2.5
    """Where a job hangs, all live ranks show where they stand before it ends."""


class ScriptExit(Exception):
    """The user's script left by `sys.exit` with a code other than 0."""

    def __init__(self, code: int, where: str) -> None:
        super().__init__(f"The script called sys.exit({code}) at {where}.")
        self.code = code


@dataclass(frozen=True)
class FailFast:
    """One rank's failure ends the whole job at once; the rank with the cause shows it."""

    grace: Grace = Grace()
    stream: TextIO | None = None
    """Where errors are shown; standard error by default."""
    end: Callable[[int], object] = end_process
    """Ends this process, with an exit code, where it hangs after another rank's failure."""
    wording: Wording = in_script
    """How errors name options: as a script's arguments, or as flags of the command line."""

    def fail(self, control: ControlChannel, environment: Environment, error: BaseException) -> int:
        """Show ``error`` if this rank is the one to show it, and end the job.

        In a job of several ranks it does not return: `ControlChannel.abort` ends it.
        """
        if control.size == 1:
            return show_failure(environment, error, stream=self.stream, wording=self.wording)
        remark = ""
        if is_consequence(error):
            shows, remark = self._without_cause(control, environment)
        else:
            shows = self._shows(control, describe(error, self.wording)[-_REPORTED_CHARACTERS:])
        if shows:
            show_failure(environment, error, stream=self.stream, remark=remark, wording=self.wording)
        elif self.stream is None:
            _close_standard_error()
        time.sleep(self.grace.output if shows else self.grace.silent)
        control.abort(exit_code(error))

    def others_failed(self, control: ControlChannel, failed: Collection[int], stopped: threading.Event) -> None:
        """End this process unless it ends by itself within the time of grace."""
        if stopped.wait(self.grace.hanging):
            return
        say(
            f"hvdtrain: rank {control.rank} still ran {self.grace.hanging:g} s after {name_ranks(failed)} failed, and "
            "is ended."
        )
        self.end(EXIT_FAILURE)

    def hung(
        self, control: ControlChannel, environment: Environment, text: str, show_stacks: Callable[[], None]
    ) -> None:
        """Say that the job hangs, let every live rank show where it stands, and end the job."""
        shown = f"hvdtrain: error: {self.wording(text)} [rank {environment.rank} ({environment.hostname})]"
        say(shown, self.stream)
        control.report_failure(HANG + text[:_REPORTED_CHARACTERS])
        show_stacks()
        time.sleep(self.grace.stacks)
        control.abort(EXIT_HANG)

    def broken_link(self, control: ControlChannel, environment: Environment, text: str) -> None:
        """Say which hosts cannot be reached, unless another rank of this host does, and end the job."""
        if self._shows(control, text):
            shown = f"hvdtrain: error: {self.wording(text)} [rank {environment.rank} ({environment.hostname})]"
            say(shown, self.stream)
        time.sleep(self.grace.output)
        control.abort(EXIT_FAILURE)

    def _shows(self, control: ControlChannel, report: str) -> bool:
        """Report this rank's error, and tell whether no lower rank shows the same one."""
        control.report_failure(report)

        def said_by_lower() -> bool:
            return any(rank < control.rank and text == report for rank, text in control.failures().items())

        return control.rank == 0 or not _wait(said_by_lower, self.grace.same)

    def _without_cause(self, control: ControlChannel, environment: Environment) -> tuple[bool, str]:
        """Wait for the report of the cause; return whether this rank is to show its error for want of one, and why.

        Not until then is a consequence reported as a failure, so that it ends no rank that is yet to tell the cause.
        """
        with contextlib.suppress(LaunchError):
            control.post(_CUT_OFF, b"yes")
        pause = max(0.05, control.size**2 / _REQUESTS_A_SECOND)

        def known() -> bool:
            return bool(control.failures()) or not _unheard(control) or _has_lost_rank_0(control, environment)

        _wait(known, self.grace.cause, pause)
        if control.failures():
            return False, ""
        if _has_lost_rank_0(control, environment):
            here = f"rank {environment.rank} ({environment.hostname})"
            say(f"hvdtrain: error: {_RANK_0_IS_GONE} [{here}]", self.stream)
            return False, ""
        unheard = _unheard(control)
        if unheard:
            remark = f"cut off from {name_ranks(unheard)}, of which nothing was heard: killed, or its machine is gone"
        else:
            remark = "cut off, as all other ranks were"
        lower = set(range(control.rank)) - unheard
        if lower:
            return False, ""
        control.report_failure(remark)
        return True, remark


def _close_standard_error() -> None:
    """Discard what Horovod's thread would say of connections that the rank with the cause closes."""
    flush_output()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _has_lost_rank_0(control: ControlChannel, environment: Environment) -> bool:
    """Tell whether the store of the job, which rank 0 kept, has gone with it, and nobody has said why."""
    if not environment.store_on_rank_0 or control.rank == 0:
        return False
    try:
        control.read(_CUT_OFF)
    except LaunchError:
        return True
    return False


def _unheard(control: ControlChannel) -> set[int]:
    """Return the ranks that have not said that they were cut off."""
    try:
        return set(range(control.size)) - control.read(_CUT_OFF).keys() - {control.rank}
    except LaunchError:
        return set(range(control.size)) - {control.rank}


def show_failure(
    environment: Environment | None,
    error: BaseException,
    *,
    stream: TextIO | None = None,
    remark: str = "",
    wording: Wording = in_script,
) -> int:
    """Show what ended the run, in one piece, so that the launcher does not mix it with other ranks' lines.

    Before the control channel is open, leave a job of several ranks by `end_process` with the code returned: a plain
    exit would wait for the other ranks in MPI_Finalize.

    Args:
        environment: this process's place, or None if it is not known.
        error: what ended the run.
        stream: where it is shown; standard error by default.
        remark: what is to be said instead of "failed".
        wording: how a `UserError` names options: `in_script` or `on_command_line`.

    Returns:
        The exit code.
    """
    rank, size = (environment.rank, environment.size) if environment else (0, 1)
    here, text = f"rank {rank} ({environment.hostname})" if environment else "", describe(error, wording)
    if isinstance(error, KeyboardInterrupt):
        line = f"hvdtrain: {str(error) or text}"
    elif isinstance(error, UserError | ScriptExit) or limit_reached(error) is not None:
        place = _place_in_script(error) if wording is in_script else ""
        places = [place, here if rank > 0 or isinstance(error, ScriptExit) else ""]
        kind = "" if exit_code(error) == EXIT_REQUEUE else "error: "  # who asks for a new start has not failed
        line = f"hvdtrain: {kind}{text}" + (f" [{', '.join(filter(None, places))}]" if any(places) else "")
    elif remark:
        line = f"{here} was {remark}:\n{text}"
    else:
        line = (f"{here} failed:\n" if size > 1 else "") + text
    say(line, stream)
    flush_output()
    return exit_code(error)


def show_alone(environment: Environment | None, error: BaseException, *, wording: Wording = in_script) -> int:
    """Show what ended a rank that has no channel to the others, as `show_failure`.

    Of ranks that are sure to meet the same `LoneRanksError` the first shows it. The others leave a while later, so that
    no launcher ends that one before it has spoken; Open MPI has ended them by then, unless they alone met it.
    """
    if isinstance(error, LoneRanksError) and error.rank > 0:
        time.sleep(Grace.silent)
        if environment is None or environment.launcher != "mpirun":
            return exit_code(error)
    return show_failure(environment, error, wording=wording)


def describe(error: BaseException, wording: Wording = in_script) -> str:
    """Return what is shown of ``error``, the same on every rank that makes it."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, UserError):
        return wording(error.message)
    limit = limit_reached(error)
    if limit is not None:  # wherever it was met: a traceback says nothing about it
        return f"{error}. {limit}"
    if isinstance(error, ScriptExit):
        return str(error)
    text = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, BlockingIOError) and "unable to lock file" in str(error):  # as HDF5 says of several writers
        text += "\nEach rank writes this file: let one do so, with `if hvdtrain.rank() == 0:`."
    # What our own code raises may be a mistake in it.
    ours = error.__traceback__ is not None and _is_ours(traceback.extract_tb(error.__traceback__)[-1].filename)
    return text if ours else filtered(text)


def _place_in_script(error: BaseException) -> str:
    """Return the line of the script that met an error, `train.py:75`; empty if no script did."""
    frames = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__) if _is_main(frame)
    ]
    return f"{os.path.basename(frames[-1][0])}:{frames[-1][1]}" if frames else ""


def _is_main(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return frame.f_globals.get("__name__") == "__main__" and not file.startswith("<") and not _is_ours(file)


def _is_ours(file: str) -> bool:
    return file.startswith(f"{_folder_of('hvdtrain')}{os.sep}")


def _folder_of(package: str) -> str | None:
    file = getattr(sys.modules.get(package), "__file__", None)
    return None if file is None else os.path.dirname(file)


def filtered(text: str) -> str:
    """Return a traceback without the frames of hvdtrain, Keras and TensorFlow, as Keras filters its own.

    The messages of TensorFlow's errors list frames too. All stay where no other code takes part, and where the script
    has called `keras.config.disable_traceback_filtering()`.
    """
    keras = sys.modules.get("keras")
    if keras is None or not keras.config.is_traceback_filtering_enabled():
        return text
    folders = "|".join(
        re.escape(folder) for name in ("hvdtrain", "keras", "tensorflow") if (folder := _folder_of(name))
    )
    # A frame, with its lines of code, which are indented more than it; in messages of TensorFlow an empty line follows.
    frame = rf'^( *)File "(?:{folders})/[^"\n]*", line \d+, in [^\n]*\n(?:\1 +(?!File ")[^\n]*\n)*\n?'
    left = re.sub(frame, "", text, flags=re.MULTILINE)
    if left == text or not re.search(r'^ *File "(?!<frozen )', left, re.MULTILINE):
        return text
    return f"{left}\nFrames of hvdtrain, Keras and TensorFlow are left out: keras.config.disable_traceback_filtering()."


def exit_code(error: BaseException) -> int:
    """Return the exit code for a run that ended with ``error``: 2 for a UserError, 130 for KeyboardInterrupt, else 1.

    Who leaves by ``sys.exit`` chooses it; 0 is none for a run that did not end.
    """
    if isinstance(error, ScriptExit):
        return error.code
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code or EXIT_FAILURE
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return EXIT_USER_ERROR if isinstance(error, UserError) else EXIT_FAILURE


def _wait(condition: Callable[[], bool], seconds: float, pause: float = 0.05) -> bool:
    """Return whether ``condition`` came true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
    return True
