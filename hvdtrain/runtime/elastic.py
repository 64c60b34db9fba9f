"""Run an elastic job: worlds that follow one another in the same processes, as ranks are lost and others come.

`horovodrun` with host discovery decides who takes part, and Horovod tells that a rank is gone. `Worlds` is the loop
that a process goes through; it tells `horovodrun`, which gives up ranks that fall silent, that it lives, and hears from
it of hosts that come and go.
"""

import contextlib
import gc
import hashlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from hvdtrain.config.errors import LaunchError, MissingRankError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.broken_links import shared, sockets
from hvdtrain.runtime.consequences import is_consequence
from hvdtrain.runtime.control.channel import ControlChannel, end_process
from hvdtrain.runtime.control.store import Store, split_address
from hvdtrain.runtime.launchers import PLACE
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.runtime.tuning import GLOO_PATIENCE

SCOPE = "heartbeat"
"""Scope of these messages in the store of `horovodrun` (its patch `silent-ranks`); the key is HOST:LOCAL_RANK."""
_LONGEST_PAUSE_S = 5.0


def encode_beat(lost_after: float, start_timeout: float) -> bytes:
    """Encode what a rank tells of its job with each sign of life.

    Args:
        lost_after: seconds of silence after which a rank counts as lost.
        start_timeout: seconds that a rank which has just been started has for its first sign.
    """
    return json.dumps({"lost_after": lost_after, "start_timeout": start_timeout}).encode()


class Heartbeat:
    """A thread that gives signs of life for as long as the process lives, also between two worlds."""

    def __init__(self, environ: Mapping[str, str], start_timeout: float) -> None:
        self._environ = environ
        self._start_timeout = start_timeout
        address, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self._store = Store(address, port, patience=0.0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdtrain-heartbeat", daemon=True)

    def start(self) -> None:
        """Begin; once only."""
        self._thread.start()

    def stop(self) -> None:
        """Fall silent."""
        self._stopped.set()

    def _run(self) -> None:
        pause = 0.0
        while not self._stopped.wait(pause):
            lost_after = float(self._environ[GLOO_PATIENCE])  # Gloo counts the same seconds
            with contextlib.suppress(LaunchError):  # the next one may arrive
                self._store.put(SCOPE, place_of(self._environ), encode_beat(lost_after, self._start_timeout))
            pause = min(_LONGEST_PAUSE_S, lost_after / 4)


def place_of(environ: Mapping[str, str]) -> str:
    """Return the name by which `horovodrun` knows this process: HOST:LOCAL_RANK."""
    return f"{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}"


ELASTIC = "HOROVOD_ELASTIC"
_THREADS = "/proc/self/task"


class NoPlaceError(LaunchError):
    """The launcher has no place for this process in the world that begins."""


def take_next_place(environ: MutableMapping[str, str], timeout: float) -> None:
    """Ask `horovodrun` for this process's place in the next world, and write it to `environ`.

    It answers once all other ranks that are left have asked, too.

    Raises:
        NoPlaceError: there is none for this process.
        LaunchError: no answer came.
    """
    address, port = environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    host, path = split_address(address, port)
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:  # once it is asked, it must not be asked again
        with contextlib.closing(connection):
            connection.request("GET", f"{path}/rank_and_size/{place_of(environ)}")
            answer = connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise LaunchError(
            f"horovodrun gave no place in the next world ({type(error).__name__}: {error}): it has ended, or a rank "
            f"that is left did not ask for its own within {timeout:g} s."
        ) from error
    numbers = [int(number) for number in answer.split(",")]
    if numbers[0] < 0:
        raise NoPlaceError(f"{environ['HOROVOD_HOSTNAME']} was taken out of the elastic job: this process ends.")
    environ.update({f"HOROVOD_{name.upper()}": str(value) for name, value in zip(PLACE, numbers, strict=True)})


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
    the lost one, would do so until Gloo loses patience. The watchdog looks at it, and cuts them. What Python has
    started or opened meanwhile, as another thread of the script does, is none of it.

    Args:
        threads_before: what `threads` returned before Horovod started; it just has.
        sockets_before: what `sockets` returned then.
    """

    ends_job = False

    def __init__(self, threads_before: set[str], sockets_before: set[str]) -> None:
        self._threads = threads() - threads_before - {str(each.native_id) for each in threading.enumerate()}
        pythons = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)}
        self._sockets = {name for name, number in sockets().items() if number not in pythons} - sockets_before

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
                with contextlib.suppress(OSError), shared(name, descriptor) as same:
                    if same is not None:
                        same.shutdown(socket.SHUT_RDWR)


def threads() -> set[str]:
    """Return the numbers of this process's threads, those of C++ too; none where the system does not tell."""
    try:
        return set(os.listdir(_THREADS))
    except OSError:
        return set()


class HostsChangedError(Exception):
    """The hosts of the job have changed: this world ends, and nothing of it is lost."""


_NO_PLACE = 1
"""Exit code, at which horovodrun does not look where it has taken the host out of the job itself."""
_LOOKS, _PAUSE_S = 5, 0.1
"""A rank that fails reports it before its exchanges break, but the store may be slow to answer."""


class Worlds:
    """The worlds that this process takes part in, one after another.

    It is a listener of Horovod's notification service, by which `horovodrun` tells of hosts that come and go: only the
    process that is rank 0 by then hears it, and any may be.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._environ = environ
        self.hosts_changed = False
        """Whether hosts have come or gone since this world began; the launcher tells rank 0 alone."""
        self.entered = 0
        """Worlds that this process has been in, this one included."""
        self.trained = False
        """Whether the elastic training of a script has begun."""
        self.training = False
        """Whether an elastic training is under way, which goes on without ranks that are lost."""
        self.over = False
        """Whether all ranks are done: they end as they like."""

    def enter(self, start_timeout: float) -> None:
        """Take this rank's place in the next world; a process for which there is none ends.

        The first place is in the environment already.

        Args:
            start_timeout: seconds that ranks wait for those that have just been started.
        """
        if not self.entered:
            Heartbeat(self._environ, start_timeout).start()
        self.hosts_changed = False
        if self.entered:
            try:
                take_next_place(self._environ, RuntimeConfig.load_timeout)
            except NoPlaceError as error:
                LOGGER.warning(error.message)
                end_process(_NO_PLACE)
        self.entered += 1
        self.listen()

    def listen(self) -> None:
        """Begin to hear of hosts, for as long as the process lives; may be called again."""
        from horovod.common.elastic import notification_manager

        notification_manager.init()
        notification_manager.register_listener(self)

    def on_hosts_updated(self, timestamp: int, update_res: Any) -> None:
        """Note that the hosts have changed; called by Horovod, on a thread of its own."""
        self.hosts_changed = True

    @property
    def can_leave(self) -> bool:
        """Whether another world can follow this one."""
        return True

    def leave(self) -> None:
        """End Horovod here, if it has started: this world is over."""
        import horovod.tensorflow as hvd

        hvd.shutdown()

    @property
    def patience(self) -> float:
        """Seconds for which a job that hangs waits for silent ranks to be given up, beyond its hang timeout."""
        return float(self._environ[GLOO_PATIENCE]) if self.training else 0.0

    @property
    def job(self) -> str:
        """Name of the job, the same in all of its worlds; others cannot reach its store by it."""
        address, port = self._environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], self._environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        return hashlib.sha256(f"{address} {port}".encode()).hexdigest()[:16]


def is_over(error: BaseException, control: ControlChannel) -> bool:
    """Return whether `error` ends this world and not the job: a rank was lost, or the hosts have changed.

    A rank that was lost has reported nothing. What a rank reports is a mistake, which another world would only repeat.
    """
    if isinstance(error, HostsChangedError):
        return True
    if not isinstance(error, MissingRankError) and not is_consequence(error):
        return False
    for _ in range(_LOOKS):
        if control.failures():
            return False
        time.sleep(_PAUSE_S)
    return True
