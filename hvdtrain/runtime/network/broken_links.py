"""Finds, on the watchdog's thread, that another host cannot be reached any more, and ends the job.

Where a cable is cut or a machine loses its power, nothing tells the ranks of other hosts: TCP sends again for a quarter
of an hour. Here the systems of the hosts ask one another for signs of life over the connections that the ranks have
anyway. A rank that stands still has a system that answers: it is not taken for a host that is gone.
"""

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence

from hvdtrain.config.errors import opt
from hvdtrain.runtime.control.channel import name_ranks
from hvdtrain.runtime.network.sockets import heard, probe_when_idle, remote_address, shared, sockets

_STALL_S = 5.0
"""Seconds without a look after which this process, or its machine, stood still itself: it then knows nothing."""
_LIST_S = 5.0
"""Between two looks for new connections."""


class BrokenLinkWatch:
    """Watches the connections to the other hosts of the job; see `Watch`.

    Args:
        hosts: name of each other host, by each of its addresses.
        ranks: the ranks of each other host.
        timeout: seconds without a sign of life after which a host counts as gone.
        end: called once with what is to be said, where one is.
        now: the time in seconds, of `time.monotonic` by default.
    """

    def __init__(
        self,
        hosts: Mapping[str, str],
        ranks: Mapping[str, Sequence[int]],
        timeout: float,
        end: Callable[[str], None],
        *,
        now: float | None = None,
    ) -> None:
        self._hosts = hosts
        self._ranks = ranks
        self._timeout = timeout
        self._end = end
        self._looked = self._awake_since = time.monotonic() if now is None else now
        self._listed = -math.inf
        self._connections: dict[str, tuple[int, str]] = {}
        self.ends_job = False

    def look(self, now: float) -> None:
        """Look once, at the time `now`."""
        if now - self._looked > _STALL_S:
            self._awake_since = now
        self._looked = now
        if now - self._listed >= _LIST_S:
            self._listed = now
            self._find_connections()
        silent = {host: min(seconds, now - self._awake_since) for host, seconds in self._silence().items()}
        gone = sorted(host for host, seconds in silent.items() if seconds >= self._timeout)
        if gone and not self.ends_job:
            self.ends_job = True
            self._end(describe_broken_link(gone, self._ranks, max(silent[host] for host in gone)))

    def _find_connections(self) -> None:
        """Note the connections to other hosts, and have the system probe those that are new."""
        found = {}
        for name, descriptor in sockets().items():
            known = self._connections.get(name)
            with contextlib.suppress(OSError):  # closed meanwhile
                host = known[1] if known else self._probed(name, descriptor)
                if host is not None:
                    found[name] = descriptor, host
        self._connections = found

    def _probed(self, name: str, descriptor: int) -> str | None:
        """Return the host that a socket leads to, after its system has been told to probe it; None for others."""
        with shared(name, descriptor) as connection:
            address = None if connection is None else remote_address(connection)
            host = None if address is None else self._hosts.get(address)
            if connection is not None and host is not None:
                probe_when_idle(connection, max(1, round(self._timeout / 5)))
            return host

    def _silence(self) -> dict[str, float]:
        """Return for how many seconds nothing has come from each host, over any of its connections."""
        silent: dict[str, float] = {}
        for name, (descriptor, host) in self._connections.items():
            with contextlib.suppress(OSError), shared(name, descriptor) as connection:
                last = None if connection is None else heard(connection)
                if last is not None and not last.no_room:
                    silent[host] = min(silent.get(host, math.inf), last.seconds)
        return silent


def describe_broken_link(hosts: Sequence[str], ranks: Mapping[str, Sequence[int]], seconds: float) -> str:
    """Return what the user is told where hosts cannot be reached any more."""
    named = ", ".join(f"{host} ({name_ranks(ranks[host])})" for host in hosts)
    return (
        f"The link to {named} is broken: no packet has come from there for {seconds:.0f} s. The network or the "
        f"{'machine' if len(hosts) == 1 else 'machines'} must be down, or this host's own network. Mend it and start "
        f"the job again; where a network may be away for longer, use a larger {opt('link_timeout')} (0: wait for it)."
    )
