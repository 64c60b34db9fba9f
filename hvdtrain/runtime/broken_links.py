"""End the job, on the watchdog's thread, when another host is unreachable.

Where a cable is cut or a machine loses its power, nothing tells the ranks of other hosts: TCP sends again for a quarter
of an hour. Here the systems of the hosts ask one another for signs of life over the connections that the ranks have
anyway. A rank that stands still has a system that answers: it is not taken for a host that is gone.
"""

import array
import contextlib
import fcntl
import math
import os
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.config.errors import opt
from hvdtrain.runtime.control.channel import ControlChannel, gather, name_ranks
from hvdtrain.runtime.interfaces import own_addresses
from hvdtrain.runtime.launchers import Environment


@dataclass(frozen=True)
class Place:
    """The host of a rank, and the addresses at which others may reach it."""

    host: str
    addresses: Sequence[str]


def exchange_places(control: ControlChannel, environment: Environment, *, timeout: float) -> list[Place]:
    """Return the place of each rank. Collective.

    Raises:
        LaunchError: a rank did not come within `timeout` seconds.
    """
    mine = {"host": environment.hostname, "addresses": list(own_addresses())}
    return [Place(**theirs) for theirs in gather(control, mine, timeout=timeout)]


_DESCRIPTORS = "/proc/self/fd"
_TCP_INFO = struct.Struct("=8B24I")
"""The head of `struct tcp_info` (linux/tcp.h), which does not change."""
_WINDOW = struct.Struct("=I")
_WINDOW_AT = 228
"""Where the room that the other end has stands in it, from Linux 5.4 on."""
_ESTABLISHED = 1
_PROBES = 100
"""Unanswered ones after which the system gives a connection up: later than whoever looks at it here."""


def sockets() -> dict[str, int]:
    """Return the open sockets of this process, those of C++ too: their descriptors by the system's names."""
    found = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):  # it has just been closed
                name = os.readlink(f"{_DESCRIPTORS}/{entry}")
                if name.startswith("socket:"):
                    found[name] = int(entry)
    return found


@contextlib.contextmanager
def shared(name: str, descriptor: int) -> Iterator[socket.socket | None]:
    """Context with a second handle of a socket; None where the descriptor is no longer that of `name`."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        yield same if os.readlink(f"{_DESCRIPTORS}/{same.fileno()}") == name else None


def remote_address(connection: socket.socket) -> str | None:
    """Return the address of the other end of a TCP connection; None if it is this host, or no such connection."""
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:  # an IPv6 socket gives an IPv4 address a prefix
        ends = (connection.getsockname(), connection.getpeername())
        own, other = (str(end[0]).removeprefix("::ffff:") for end in ends)
    except OSError:  # it listens, or is not connected yet
        return None
    return None if own == other or other == "::1" or other.startswith("127.") else other


def probe_when_idle(connection: socket.socket, every: int) -> None:
    """Have the system ask the other end's system for a sign of life, every so many seconds in which nothing came."""
    for option, value in ((socket.TCP_KEEPIDLE, every), (socket.TCP_KEEPINTVL, every), (socket.TCP_KEEPCNT, _PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def silent_for(connection: socket.socket) -> float | None:
    """Return the seconds since anything came over a connection: data, or a sign of life of the other end's system.

    None if it is not established, or if data wait that the other end has no room for: the system then asks it at
    growing intervals only.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW_AT + _WINDOW.size)
    fields = _TCP_INFO.unpack_from(info)
    state, unacknowledged, data, acknowledgement = fields[0], fields[12], fields[19], fields[20]
    if state != _ESTABLISHED:
        return None
    waiting = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
    room = _WINDOW.unpack_from(info, _WINDOW_AT)[0] if len(info) >= _WINDOW_AT + _WINDOW.size else 1
    if waiting[0] > 0 and (not room or not unacknowledged):
        return None
    return float(min(data, acknowledgement) / 1000)


_STALL_S = 5.0
"""Seconds without a look after which this process, or its machine, stood still itself: it then knows nothing."""
_LIST_S = 5.0
"""Between two looks for new connections."""


class BrokenLinkWatch:
    """Watches the connections to the other hosts of the job, on the watchdog's thread.

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
        gone = {host: seconds for host, seconds in sorted(silent.items()) if seconds >= self._timeout}
        if gone and not self.ends_job:
            self.ends_job = True
            named = ", ".join(f"{host} ({name_ranks(self._ranks[host])})" for host in gone)
            self._end(
                f"The link to {named} is broken: no packet has come from there for {max(gone.values()):.0f} s. The "
                f"network or the {'machine' if len(gone) == 1 else 'machines'} must be down, or this host's own "
                "network. Repair it and start the job again; if a network may be away for longer, use a larger "
                f"{opt('link_timeout')} (0: wait for it)."
            )

    def _find_connections(self) -> None:
        """Note the connections to other hosts, and have the system probe those that are new."""
        found = {}
        for name, descriptor in sockets().items():
            with contextlib.suppress(OSError):  # closed meanwhile
                if name in self._connections:
                    found[name] = descriptor, self._connections[name][1]
                    continue
                with shared(name, descriptor) as connection:
                    host = None if connection is None else self._hosts.get(remote_address(connection) or "")
                    if connection is not None and host is not None:
                        probe_when_idle(connection, max(1, round(self._timeout / 5)))
                        found[name] = descriptor, host
        self._connections = found

    def _silence(self) -> dict[str, float]:
        """Return for how many seconds nothing has come from each host, over any of its connections."""
        silent: dict[str, float] = {}
        for name, (descriptor, host) in self._connections.items():
            with contextlib.suppress(OSError), shared(name, descriptor) as connection:
                seconds = None if connection is None else silent_for(connection)
                if seconds is not None:
                    silent[host] = min(silent.get(host, math.inf), seconds)
        return silent
