"""The end of a rank that `horovodrun` over Gloo no longer wants: SIGTERM, then time to end with a code of its own.

Horovod starts a rank through a shell, from a process of its own per rank, the middleman. Its way to end them has three
flaws that make a rank's exit code a matter of chance. Where the shell has replaced itself by its command, as bash does
(`/bin/sh` of Red Hat and its kin), it stops and ends the rank without asking. Where it has not, it strikes the shell as
soon as the rank is gone, often before the shell could pass the rank's code on. And its wait for the shell may take the
exit status away from the middleman, which then reports 0.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hvdtrain.runtime.horovodrun.replaced import replaced

_LOOK_EVERY_S = 0.02


def middleman(*args: Any) -> None:
    """Stand in for Horovod's `_exec_middleman`; runs in a new process, given that function's arguments."""
    from horovod.runner.common.util import safe_shell_exec

    with replaced(safe_shell_exec, terminate_executor_shell_and_children=end_in_order):
        safe_shell_exec._exec_middleman(*args)


def end_in_order(shell: int, grace: float | None = None) -> None:
    """End the rank that a shell runs, or that has taken the shell's place; returns when both have ended.

    Args:
        shell: the process ID of the shell, a child of this process.
        grace: seconds from SIGTERM to SIGKILL; None: Horovod's.
    """
    import psutil
    from horovod.runner.common.util import safe_shell_exec

    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(shell)
        for process in started.children() if _is_shell(started) else [started]:
            _send(process.terminate)
        if not _ends(shell, safe_shell_exec.GRACEFUL_TERMINATION_TIME_S if grace is None else grace):
            for process in [*started.children(recursive=True), started]:
                _send(process.kill)
            _ends(shell, safe_shell_exec.GRACEFUL_TERMINATION_TIME_S)


def _is_shell(process: Any) -> bool:
    """Tell whether `process` is the shell of `subprocess` still, and not its command."""
    return process.cmdline()[:2] == ["/bin/sh", "-c"]


def _send(end: Callable[[], None]) -> None:
    import psutil

    with suppress(psutil.NoSuchProcess):
        end()


def _ends(child: int, patience: float) -> bool:
    """Return whether a child of this process ends in time. Its exit status is left for others to collect."""
    deadline = time.monotonic() + patience
    while True:
        try:
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return True
        except ChildProcessError:  # collected
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_EVERY_S)
