"""Horovod in an elastic job: this rank's place in the next world, and the end of one in which a rank is lost."""

import contextlib
import http.client
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.store import split_address
from hvdtrain.runtime.elastic.heartbeat import place_of
from hvdtrain.runtime.network.sockets import shared, sockets

ELASTIC = "HOROVOD_ELASTIC"
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_THREADS = "/proc/self/task"


class NoPlaceError(LaunchError):
    """The launcher has no place for this process in the world that begins."""


def take_next_place(environ: MutableMapping[str, str], timeout: float) -> None:
    """Ask `horovodrun` for this process's place in the next world, and write it to `environ`.

    It answers once all other ranks that are left have asked, too.

    Args:
        environ: of the process.
        timeout: seconds to wait for that.

    Raises:
        NoPlaceError: there is none for this process.
        LaunchError: no answer came.
    """
    try:
        answer = _ask(environ, timeout)
    except (OSError, http.client.HTTPException) as error:
        raise LaunchError(
            f"horovodrun gave no place in the next world ({type(error).__name__}: {error}): it has ended, or a rank "
            f"that is left did not ask for its own within {timeout:g} s."
        ) from error
    numbers = [int(number) for number in answer.split(",")]
    if numbers[0] < 0:
        raise NoPlaceError(f"{environ['HOROVOD_HOSTNAME']} was taken out of the elastic job: this process ends.")
    environ.update({f"HOROVOD_{name}": str(number) for name, number in zip(_PLACE, numbers, strict=True)})


def _ask(environ: Mapping[str, str], timeout: float) -> str:
    """Return what `horovodrun` answers; once it is asked, it must not be asked again."""
    address, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    host, path = split_address(address, port)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    with contextlib.closing(connection):
        connection.request("GET", f"{path}/rank_and_size/{place_of(environ)}")
        return connection.getresponse().read().decode()


@contextmanager
def place_taken(environ: MutableMapping[str, str]) -> Iterator[None]:
    """Context in which Horovod starts without asking for its place once more.

    It would count as another rank, and where a rank is lost meanwhile, Horovod's C++ ends the process.
    """
    before = environ[ELASTIC]
    environ[ELASTIC] = "0"
    try:
        yield
    finally:
        environ[ELASTIC] = before


class Engine:
    """Horovod's threads and connections in this process, as it has started them for a world.

    Horovod leaves its connections open when it stops because a rank is lost: ranks that wait for this one, and not for
    the lost one, would do so until Gloo loses patience. The watchdog looks at it, and cuts them.

    Args:
        threads_before: what `threads` returned before Horovod started; it just has.
        sockets_before: what `sockets` returned then.
    """

    ends_job = False

    def __init__(self, threads_before: set[str], sockets_before: set[str]) -> None:
        self._threads = threads() - threads_before
        self._sockets = set(sockets()) - sockets_before

    @property
    def stopped(self) -> bool:
        """Whether Horovod has stopped, as it does when a rank is lost."""
        return bool(self._threads - threads())

    def check(self) -> None:
        """Raise HorovodInternalError once Horovod has stopped."""
        from horovod.common.exceptions import HorovodInternalError

        if self.stopped:
            raise HorovodInternalError("Horovod has stopped: a rank is gone.")

    def look(self, now: float) -> None:
        """Cut the connections once Horovod has stopped; see `Watch.look`."""
        if self.stopped:
            self.cut()

    def cut(self) -> None:
        """Shut the connections down, so that every rank that waits for this one sees that this world is over."""
        for name, descriptor in sockets().items():
            if name in self._sockets:
                _shut_down(name, descriptor)


def threads() -> set[str]:
    """Return the numbers of this process's threads, those of C++ too; none where the system does not tell."""
    try:
        return set(os.listdir(_THREADS))
    except OSError:
        return set()


def _shut_down(name: str, descriptor: int) -> None:
    """Shut a socket down, if the descriptor is still that of `name`."""
    with contextlib.suppress(OSError), shared(name, descriptor) as same:
        if same is not None:
            same.shutdown(socket.SHUT_RDWR)
