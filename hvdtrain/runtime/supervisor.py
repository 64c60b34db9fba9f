"""Starts a job again after it has failed, a limited number of times."""

import signal
import subprocess
import time
from collections.abc import Sequence
from types import FrameType

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.failures import EXIT_USER_ERROR
from hvdtrain.runtime.stopping import EXIT_INTERRUPTED, EXIT_REQUEUE
from hvdtrain.runtime.terminal import say

NOT_AGAIN = {
    EXIT_USER_ERROR: "a mistake in its options, which would be the same again",
    EXIT_INTERRUPTED: "it was interrupted",
    EXIT_REQUEUE: "it was saved and stopped by a signal, for its scheduler to start it again",
    128 + signal.SIGTERM: "it was terminated",
}
"""Exit codes after which a job is not started again, and why."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LONGEST_PAUSE_S = 60.0


class Supervisor:
    """Runs a command, and again where it fails.

    Signals that arrive here are passed on to the command; after one that ends it, it is not started again.

    Args:
        command: the launcher and what it starts, as a list of words.
        max_restarts: how many times it is started again.
        pause: seconds before the first restart; twice as many before each further one, a minute at most.
    """

    def __init__(self, command: Sequence[str], max_restarts: int, *, pause: float = 1.0) -> None:
        self._command = list(command)
        self._most = max_restarts
        self._pause = pause
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = False

    def run(self) -> int:
        """Run the command until it succeeds or is not to be started again; return its last exit code."""
        before = {number: signal.signal(number, self._pass_on) for number in _FORWARDED}
        try:
            for restarts in range(self._most + 1):
                begin = time.monotonic()
                code = self._run_once()
                if not self._goes_on(code, restarts, time.monotonic() - begin):
                    break
            return code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_once(self) -> int:
        try:
            # A group of its own: Ctrl-C reaches it from here, once.
            self._process = subprocess.Popen(self._command, process_group=0)
        except OSError as error:
            raise LaunchError(f"The command cannot be started: {self._command[0]} ({error.strerror}).") from error
        if self._ending:
            self._process.terminate()
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def _goes_on(self, code: int, restarts: int, seconds: float) -> bool:
        """Tell whether a command that ended with `code` is started again, after the pause."""
        if code == 0 or self._ending:
            return False
        ended = f"hvdtrain: the job ended with code {code} after {seconds:.0f} s"
        if code in NOT_AGAIN:
            say(f"{ended}: {NOT_AGAIN[code]}. It is not started again.")
            return False
        if restarts == self._most:
            say(f"{ended}, after {restarts} restarts: it is not started again.")
            return False
        say(f"{ended}. Restart {restarts + 1} of {self._most}.")
        return self._rest(min(self._pause * 2**restarts, _LONGEST_PAUSE_S))

    def _rest(self, seconds: float) -> bool:
        """Wait, and tell whether no signal came meanwhile."""
        end = time.monotonic() + seconds
        while not self._ending and time.monotonic() < end:
            time.sleep(0.1)
        return not self._ending

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._ending = self._ending or number in _ENDING
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
