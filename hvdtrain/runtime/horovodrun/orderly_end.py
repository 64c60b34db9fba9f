"""The end of a rank that `horovodrun` over Gloo no longer wants: SIGTERM, then time to end with a code of its own.

Horovod starts a rank through a shell, from a process of its own per rank, the middleman. The way it ends them has three
flaws that make a rank's exit code a matter of chance. Where the shell has replaced itself by its command, as bash does
(`/bin/sh` of Red Hat and its kin), it stops and kills the rank without asking. Where it has not, it terminates the
shell as soon as the rank is gone, often before the shell could pass the rank's code on. And its wait for the shell may
take the exit status away from the middleman, which then reports 0.
"""

import os
import threading
import time
from contextlib import suppress
from typing import Any

from hvdtrain.runtime.horovodrun.replaced import replaced

_LOOK_EVERY_S = 0.02
_AFTER_KILL_S = 5.0


def middleman(*args: Any) -> None:
    """Stand in for Horovod's `_exec_middleman`; runs in a new process, given that function's arguments."""
    from horovod.runner.common.util import safe_shell_exec

    ending = threading.Lock()

    def end(shell: int) -> None:
        with ending:
            RankEnd(shell).run(safe_shell_exec.GRACEFUL_TERMINATION_TIME_S)

    with replaced(safe_shell_exec, terminate_executor_shell_and_children=end):
        try:
            safe_shell_exec._exec_middleman(*args)
        finally:
            # The shell has ended; a thread may still be ending what it has left.
            with ending:
                pass


class RankEnd:
    """Ends the rank that a shell runs, or that has taken the shell's place, with all that it has started.

    Args:
        shell: the process ID of the shell, a child of this process.
    """

    def __init__(self, shell: int) -> None:
        import psutil

        self._shell = shell
        self._error = psutil.Error
        self._zombie = psutil.STATUS_ZOMBIE
        self._known: dict[int, Any] = {}
        """The shell and its descendants, by process ID: of one whose parent has ended nobody else knows."""
        self._asked: set[int] = set()
        with suppress(self._error):
            self._known[shell] = psutil.Process(shell)

    def run(self, grace: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace` seconds; returns when all have ended.

        The topmost process gets SIGTERM, and what it has started once it has ended itself: a rank needs its workers
        while it saves, and a script around a rank does not pass signals on.
        """
        deadline = time.monotonic() + grace
        while alive := self._alive():
            late = time.monotonic() - deadline
            if late >= 0:
                self._kill()
            elif not self._asked.intersection(process.pid for process in alive):
                self._ask()
            if late >= _AFTER_KILL_S:
                return
            time.sleep(_LOOK_EVERY_S)

    def _ask(self) -> None:
        """Send SIGTERM to the topmost processes but the shell; it may not have started its command yet."""
        self._look()
        alive = self._alive()
        parents = {process.pid for process in alive if not self._is_shell(process)}
        for process in alive:
            with suppress(self._error):
                if process.pid in parents and process.ppid() not in parents:
                    process.terminate()
                    self._asked.add(process.pid)

    def _kill(self) -> None:
        """Send SIGKILL to all, to those first that others have started."""
        self._look()
        for process in reversed(self._alive()):
            with suppress(self._error):
                process.kill()

    def _look(self) -> None:
        """Learn of descendants; it reads the list of all processes of the machine."""
        for process in self._alive():
            with suppress(self._error):
                for child in process.children(recursive=True):
                    self._known.setdefault(child.pid, child)

    def _alive(self) -> list[Any]:
        return [process for process in self._known.values() if not self._has_ended(process)]

    def _has_ended(self, process: Any) -> bool:
        if process.pid == self._shell:
            # Its exit status is left for the middleman to collect.
            try:
                return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
            except ChildProcessError:
                return True
        try:
            return not process.is_running() or process.status() == self._zombie
        except self._error:
            return True

    def _is_shell(self, process: Any) -> bool:
        """Tell whether `process` is still the shell that `subprocess` started, and not its command."""
        with suppress(self._error):
            return process.pid == self._shell and process.cmdline()[:2] == ["/bin/sh", "-c"]
        return False
