"""Resource use of worker and server ranks, measured by the chief of a parameter-server job."""

import json
import os
import socket

from hvdtrain.bench.timing import Usage, usage_of
from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.session import Session

TIMEOUT_S = 600.0
PEAK = "VmHWM:"
"""Key of the peak memory (KiB) in /proc/PID/status."""


class ServedProcesses:
    """The other ranks of a parameter-server job; empty if every rank measures itself.

    Collective: every rank of such a job creates one after opening its session, to exchange process ids.

    Raises:
        LaunchError: a rank is on another machine, or is missing.
    """

    def __init__(self, session: Session) -> None:
        self._others: list[int] = []
        if session.strategy is None or session.strategy.roles is None:
            return
        mine = json.dumps([socket.gethostname(), os.getpid()]).encode()
        known = [json.loads(text) for text in session.link.control.exchange(mine, timeout=TIMEOUT_S)]
        if any(host != socket.gethostname() for host, _ in known):
            raise LaunchError(
                "bench can tell what processes of --backend parameter_server use on one machine only. "
                f"Received: ranks on {', '.join(sorted({host for host, _ in known}))}."
            )
        if not session.serves:
            self._others = [pid for _, pid in known if pid != os.getpid()]

    def usage(self) -> Usage:
        """Return what all of them have used so far."""
        return sum((usage_of(pid) for pid in self._others), Usage())

    def peak_rss_mib(self) -> list[float]:
        """Return the peak memory of each."""
        return [_peak_mib(pid) for pid in self._others]


def _peak_mib(pid: int) -> float:
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith(PEAK))
    return int(line.split()[1]) / 1024
