"""The TCP connections of this process, those of C++ libraries too, and what the system knows of them."""

import array
import contextlib
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Iterator
from dataclasses import dataclass

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
    try:
        own, other = (_plain(end[0]) for end in (connection.getsockname(), connection.getpeername()))
    except OSError:  # it listens, or is not connected yet
        return None
    return None if own == other or other == "::1" or other.startswith("127.") else other


def _plain(address: str) -> str:
    """Return an IPv4 address that an IPv6 socket speaks to as such."""
    return address.removeprefix("::ffff:")


def probe_when_idle(connection: socket.socket, every: int) -> None:
    """Have the system ask the other end's system for a sign of life, every so many seconds in which nothing came."""
    for option, value in ((socket.TCP_KEEPIDLE, every), (socket.TCP_KEEPINTVL, every), (socket.TCP_KEEPCNT, _PROBES)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


@dataclass(frozen=True)
class Heard:
    """When something last came over a connection."""

    seconds: float
    """Since then: data, or a mere sign of life of the other end's system."""
    no_room: bool
    """Whether data wait that the other end has no room for. The system then asks it at growing intervals only."""


def heard(connection: socket.socket) -> Heard | None:
    """Return when something last came; None if the connection is not established."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _WINDOW_AT + _WINDOW.size)
    fields = _TCP_INFO.unpack_from(info)
    state, unacknowledged, data, acknowledgement = fields[0], fields[12], fields[19], fields[20]
    if state != _ESTABLISHED:
        return None
    waiting = array.array("i", [0])
    fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, waiting)
    room = _WINDOW.unpack_from(info, _WINDOW_AT)[0] if len(info) >= _WINDOW_AT + _WINDOW.size else 1
    return Heard(min(data, acknowledgement) / 1000, waiting[0] > 0 and (not room or not unacknowledged))
