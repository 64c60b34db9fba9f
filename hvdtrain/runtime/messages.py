"""Point-to-point messages between ranks over MPI, for update rules that wait for no collective.

Arrays travel as bytes, so nothing is unpickled. Any thread may send and receive; waits are polled with short sleeps, as
in `control/mpi.py`, and bounded.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.runtime.control.mpi import load_mpi
from hvdtrain.runtime.session import Session

_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
_GIVEN_UP: list[Any] = []
"""Receives that nobody waits for any more. They keep their arrays, into which MPI may still write."""


class Pause:
    """Sleeps between two looks, longer the longer nothing comes."""

    def __init__(self, longest: float = _LONGEST_S) -> None:
        self._longest = longest
        self._next = _SHORTEST_S

    def sleep(self) -> None:
        """Sleep for a moment."""
        time.sleep(self._next)
        self._next = min(2 * self._next, self._longest)

    def reset(self) -> None:
        """Note that something came."""
        self._next = _SHORTEST_S


class Messages:
    """Messages of one training, on a communicator of its own. Opening and closing are collective.

    Messages from one rank to another under one tag arrive in the order in which they were sent.

    Args:
        session: a job over MPI.
        timeout: seconds to wait for a message.

    Raises:
        ConfigError: the ranks are connected by Gloo.
    """

    def __init__(self, session: Session, timeout: float) -> None:
        if session.environment.controller != "mpi":
            raise ConfigError("Messages between ranks need MPI: start the job with mpirun, or horovodrun --mpi.")
        everyone = session.link.communicator
        self._mpi = load_mpi(session.environment, everyone)
        self._communicator = (everyone or self._mpi.COMM_WORLD).Dup()
        self._timeout = timeout
        self.rank: int = self._communicator.Get_rank()
        self.size: int = self._communicator.Get_size()
        self._unsent: list[tuple[Any, np.ndarray]] = []  # with their arrays, which MPI reads until they are sent
        self._sending = threading.Lock()
        self._own: dict[int, deque[np.ndarray]] = defaultdict(deque)
        """Arrays that this rank has sent itself, by tag: they need no MPI."""
        self.check: Callable[[], None] = lambda: None
        """Called while a message is waited for; raises if it will not come."""

    def send(self, rank: int, tag: int, *arrays: np.ndarray) -> None:
        """Send contiguous arrays, which must not change until they are received; returns at once."""
        if rank == self.rank:
            self._own[tag].extend(arrays)
            return
        for array in arrays:
            request = self._communicator.Isend([_bytes_of(array), self._mpi.BYTE], rank, tag)
            with self._sending:
                self._unsent.append((request, array))
        self.progress()

    def progress(self) -> bool:
        """Let MPI go on sending; return whether anything is left."""
        with self._sending:
            self._unsent = [(request, kept) for request, kept in self._unsent if not request.Test()]
            return bool(self._unsent)

    def arrived(self, tag: int, array: np.ndarray) -> int | None:
        """Fill `array` with a message of its size, if there is one, and return its sender."""
        if self._own[tag]:
            array[...] = self._own[tag].popleft().reshape(array.shape)
            return self.rank
        status = self._mpi.Status()
        found = self._communicator.Improbe(self._mpi.ANY_SOURCE, tag, status)
        if found is None:
            return None
        found.Recv([_bytes_of(array), self._mpi.BYTE])
        return int(status.Get_source())

    def receive(self, rank: int, tag: int, array: np.ndarray) -> None:
        """Wait for the next message of `rank` and fill `array`, of its size. Raises LaunchError if it is late."""
        deadline, pause = time.monotonic() + self._timeout, Pause()
        own = self._own[tag] if rank == self.rank else None
        request = None if own is not None else self._communicator.Irecv([_bytes_of(array), self._mpi.BYTE], rank, tag)
        try:
            while not (own if request is None else request.Test()):
                self.check()
                if time.monotonic() > deadline:
                    raise LaunchError(f"Rank {rank} sent nothing for {self._timeout:g} s: it hangs, or is far behind.")
                self.progress()
                pause.sleep()
        except BaseException:
            _GIVEN_UP.append(request)
            raise
        if own is not None:
            array[...] = own.popleft().reshape(array.shape)

    def close(self) -> None:
        """Send what is left, and free the communicator. Collective."""
        deadline = time.monotonic() + self._timeout
        while self.progress() and time.monotonic() < deadline:
            time.sleep(_SHORTEST_S)
        self._communicator.Free()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)
