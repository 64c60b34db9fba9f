"""The control channel over MPI, by mpi4py, on a communicator of its own.

It lives beside Horovod in one process: whoever comes first initialises MPI, both need MPI_THREAD_MULTIPLE.
All sends and receives are non-blocking and polled with short sleeps: MPI's own waiting would burn the core,
and could not end after a timeout. Only bytes are sent, by mpi4py's upper-case methods: the others pickle.
"""

import contextlib
import ctypes
import hmac
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NoReturn

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import end_process, flush_output
from hvdtrain.runtime.control.mpi_library import load_mpi
from hvdtrain.runtime.control.rooted import RootedChannel
from hvdtrain.runtime.control.signing import Signer, draw_secret, secret_from_environment
from hvdtrain.runtime.launchers import Environment

_TAGS = 16_384  # MPI guarantees tags up to 32,767; the exchanges' own wrap around at half of that
_LOBBY_TAG = _TAGS
_FAILURE_TAG = _TAGS + 1
_BOARD_TAG = _TAGS + 2
_SECONDS_TO_REPORT = 1.0


class MpiTransport:
    """Point-to-point messages of one communicator."""

    longest_pause = 0.005
    others_may_write = False

    def __init__(self, mpi: Any, communicator: Any, lobby: bool = False) -> None:
        self._mpi = mpi
        self._communicator = communicator
        self._lobby = lobby
        self._rank: int = communicator.Get_rank()
        self._size: int = communicator.Get_size()
        self._unsent: list[tuple[Any, bytes]] = []  # with their bytes, which MPI reads until they are sent
        self._sending = threading.Lock()
        self._posted: dict[int, bytes] = {}
        self._taking_posts = threading.Lock()

    def send(self, sequence: int, message: bytes) -> None:
        """See `Transport.send`."""
        self._send(message, 0, self._tag(sequence))

    def received(self, rank: int, sequence: int) -> bytes | None:
        """See `Transport.received`."""
        return self._receive(rank, self._tag(sequence))[1]

    def publish(self, sequence: int, message: bytes, ranks: Collection[int]) -> None:
        """See `Transport.publish`."""
        for rank in ranks:
            self._send(message, rank, self._tag(sequence))

    def published(self, sequence: int) -> bytes | None:
        """See `Transport.published`."""
        return self._receive(0, self._tag(sequence))[1]

    def finish(self, sequence: int, deadline: float) -> None:
        """See `Transport.finish`: a long message leaves only while its sender calls MPI."""
        self._push(deadline)

    def send_failure(self, message: bytes) -> None:
        """See `Transport.send_failure`."""
        for rank in range(self._size):
            if rank != self._rank:
                self._send(message, rank, _FAILURE_TAG)
        self._push(time.monotonic() + _SECONDS_TO_REPORT)

    def received_failures(self, known: Collection[int]) -> dict[int, bytes]:
        """See `Transport.received_failures`."""
        self.posted()  # the watchdog looks all the time: posts that nobody reads do not pile up within MPI
        came: dict[int, bytes] = {}
        for rank, message in self._arrived(_FAILURE_TAG):
            came.setdefault(rank, message)
        return came

    def post(self, message: bytes) -> None:
        """See `BoardTransport.post`."""
        for rank in range(self._size):
            if rank != self._rank:
                self._send(message, rank, _BOARD_TAG)
        self._still_unsent()

    def posted(self) -> dict[int, bytes]:
        """See `BoardTransport.posted`; of each rank the last one that came."""
        with self._taking_posts:
            self._posted.update(self._arrived(_BOARD_TAG))
            return dict(self._posted)

    def abort(self, code: int) -> NoReturn:
        """End all processes of the job."""
        if self._mpi.Is_initialized() and not self._mpi.Is_finalized():
            flush_output()
            _abort_without_banner(code)
            self._mpi.COMM_WORLD.Abort(code)
        end_process(code)

    def close(self) -> None:
        """See off what is not sent yet; the communicator stays, since freeing it would wait for all ranks."""
        self._push(time.monotonic() + _SECONDS_TO_REPORT)

    def _tag(self, sequence: int) -> int:
        return _LOBBY_TAG if self._lobby else sequence % _TAGS

    def _send(self, message: bytes, rank: int, tag: int) -> None:
        request = self._communicator.Isend([message, self._mpi.BYTE], rank, tag)
        with self._sending:
            self._unsent.append((request, message))

    def _push(self, deadline: float) -> None:
        """Let MPI send what is not sent yet, until ``deadline`` at most."""
        while self._still_unsent() and time.monotonic() < deadline:
            time.sleep(0.001)

    def _still_unsent(self) -> bool:
        with self._sending:
            self._unsent = [(request, kept) for request, kept in self._unsent if not request.Test()]
            return bool(self._unsent)

    def _arrived(self, tag: int) -> Iterator[tuple[int, bytes]]:
        """Yield sender and text of every message that is here, in each sender's order."""
        while True:
            rank, message = self._receive(self._mpi.ANY_SOURCE, tag)
            if message is None:
                return
            yield rank, message

    def _receive(self, source: int, tag: int) -> tuple[int, bytes | None]:
        """Return a message and its sender, or None for the message if there is none."""
        status = self._mpi.Status()
        found = self._communicator.Improbe(source, tag, status)
        if found is None:
            return source, None
        buffer = bytearray(status.Get_count(self._mpi.BYTE))
        found.Recv([buffer, self._mpi.BYTE])
        return status.Get_source(), bytes(buffer)


def _abort_without_banner(code: int) -> None:
    """End the job as Open MPI's MPI_Abort does after its banner of nine lines, which would hide what this rank said.

    Returns where the MPI is another one.
    """
    with contextlib.suppress(AttributeError, OSError, ValueError):
        library = ctypes.CDLL(None)
        world = ctypes.addressof(ctypes.c_char.in_dll(library, "ompi_mpi_comm_world"))
        library.ompi_mpi_abort(ctypes.c_void_p(world), ctypes.c_int(code))


def open_mpi(
    environment: Environment, *, timeout: float, environ: Mapping[str, str] = os.environ, generation: int = 0
) -> RootedChannel:
    """Initialise MPI where nobody has, and open the channel.

    The ranks find one another by unsigned messages, with which rank 0 also hands out the secret that it
    draws: MPI's transport is the launcher's, and as safe as that makes it. With HVDTRAIN_JOB_SECRET set, that
    one is needed as well.

    Raises:
        LaunchError: a rank is missing, the secrets differ, mpi4py is missing, or MPI counts other ranks than
            the launcher.
    """
    mpi, deadline = load_mpi(environment), time.monotonic() + timeout
    rank, size = environment.rank, environment.size
    lobby = MpiTransport(mpi, mpi.COMM_WORLD, lobby=True)
    greeting = RootedChannel(lobby, Signer(b"", ""), rank, size)
    drawn = draw_secret() if rank == 0 else b""
    drawn = greeting.exchange(drawn, timeout=timeout)[0]
    given = secret_from_environment(environ)
    secret = hmac.digest(given, drawn, "sha256") if given else drawn
    room = MpiTransport(mpi, _duplicate(mpi.COMM_WORLD, deadline))
    channel = RootedChannel(room, Signer(secret, f"{environment.job_id} {generation}"), rank, size)
    channel.barrier(max(1.0, deadline - time.monotonic()))
    return channel


def _duplicate(communicator: Any, deadline: float) -> Any:
    """Return an own communicator of the same ranks, which are all known to be here."""
    duplicate, request = communicator.Idup()
    while not request.Test():
        if time.monotonic() > deadline:
            raise LaunchError("MPI could not duplicate its communicator in time: a rank hangs in MPI.")
        time.sleep(0.001)
    return duplicate
