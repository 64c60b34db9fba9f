"""Ranks of an elastic job that fall silent, and which `horovodrun` then gives up.

By itself it takes a rank for lost when the process ends that it has started: the rank, or the `ssh` to its host.
Neither ends where a process is stopped, or a host is gone without a word, and the others wait for an hour or longer.
Ranks of `hvdtrain` give signs of life (`hvdtrain.runtime.elastic.heartbeat`). Where others wait for their place in the
next world, a rank that has given none for long enough has its process ended here; the rest is Horovod's own way.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hvdtrain.runtime.elastic.heartbeat import SCOPE, Beat
from hvdtrain.runtime.horovodrun.replaced import replaced

Slot: TypeAlias = tuple[str, int]
"""Host and local rank."""

_LOOK_EVERY_S = 0.5
_KILLED = 137
_STALL_S = 5.0
"""Without a look for so long, this process or its machine stood still itself: it then knows nothing of the ranks."""


@dataclass(eq=False)
class _Process:
    """A rank's process."""

    begun: float
    heard: float | None = None
    """When it gave its latest sign; None before the first."""
    given_up: threading.Event = field(default_factory=threading.Event)
    """Set to end it."""


class SilentRanks:
    """Finds ranks that give no sign of life while others wait for them.

    Args:
        clock: returns seconds.
        say: is given a line for the user.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, say: Callable[[str], object] = lambda line: _say(line)
    ) -> None:
        self._clock = clock
        self._say = say
        self._processes: dict[Slot, _Process] = {}
        self._asking: list[Slot] = []
        self._limits: Beat | None = None
        self._lock = threading.Lock()
        self._looked = clock()

    @contextlib.contextmanager
    def process(self, slot: Slot) -> Iterator[threading.Event]:
        """Context in which the process of `slot` runs; yields an event at which it is to be ended."""
        process = _Process(self._clock())
        with self._lock:
            self._processes[slot] = process
        try:
            yield process.given_up
        finally:
            with self._lock:
                if self._processes.get(slot) is process:
                    del self._processes[slot]

    @contextlib.contextmanager
    def asking(self, slot: Slot) -> Iterator[None]:
        """Context in which `slot` waits for its place in the next world."""
        with self._lock:
            self._asking.append(slot)
        try:
            yield
        finally:
            with self._lock:
                self._asking.remove(slot)

    def hear(self, slot: Slot, message: bytes) -> None:
        """Note a sign of life of `slot`."""
        with self._lock, contextlib.suppress(ValueError, TypeError, KeyError):
            self._limits = Beat.decode(message)
            if slot in self._processes:
                self._processes[slot].heard = self._clock()

    def look(self) -> None:
        """Give up the ranks that are silent by now, if others wait for them; call it about once a second."""
        with self._lock:
            now, before = self._clock(), self._looked
            self._looked = now
            if now - before > _STALL_S:
                self._forgive(now - before)
            if not self._asking or self._limits is None:
                return
            for slot, process in self._processes.items():
                if slot not in self._asking and not process.given_up.is_set() and self._is_silent(process, now):
                    self._give_up(slot, process, now)

    def _forgive(self, seconds: float) -> None:
        for process in self._processes.values():
            process.begun += seconds
            process.heard = None if process.heard is None else process.heard + seconds

    def _is_silent(self, process: _Process, now: float) -> bool:
        assert self._limits is not None, "checked before"
        if process.heard is None:
            return now - process.begun >= self._limits.start_timeout
        return now - process.heard >= self._limits.lost_after

    def _give_up(self, slot: Slot, process: _Process, now: float) -> None:
        silence = now - (process.begun if process.heard is None else process.heard)
        host, local_rank = slot
        self._say(
            f"horovodrun: the rank {host}[{local_rank}] has given no sign of life for {silence:.0f} s, and others wait "
            "for it: the job goes on without it. It is stopped, or its host is gone."
        )
        process.given_up.set()


@contextlib.contextmanager
def silent_ranks_given_up(gloo_run: Any) -> Iterator[None]:
    """Have Horovod's module `gloo_run` give up ranks of elastic jobs that fall silent.

    Args:
        gloo_run: `horovod.runner.gloo_run`.
    """
    create = gloo_run.create_rendezvous_handler
    with replaced(
        gloo_run,
        ElasticDriver=watching_driver(gloo_run.ElasticDriver),
        create_rendezvous_handler=lambda driver: listening_handler(create(driver), driver.silent_ranks),
    ):
        yield


def watching_driver(driver_class: type[Any]) -> type[Any]:
    """Return Horovod's ElasticDriver, which also gives up ranks that fall silent."""

    class WatchingDriver(driver_class):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.silent_ranks = SilentRanks()
            super().__init__(*args, **kwargs)

        def start(self, num_proc: int, create_worker_fn: Callable[[Any, list[Any]], Any]) -> None:
            def create_worker(slot_info: Any, events: list[Any]) -> Any:
                with self.silent_ranks.process((slot_info.hostname, slot_info.local_rank)) as given_up:
                    code, ended = create_worker_fn(slot_info, [*events, given_up])
                # A rank may have ended in order at the last moment, and the others have long given it up.
                return (code or _KILLED if given_up.is_set() else code), ended

            threading.Thread(target=self._watch, name="hvdtrain-silent-ranks", daemon=True).start()
            super().start(num_proc, create_worker)

        def record_ready(self, host: str, slot: int) -> None:
            with self.silent_ranks.asking((host, slot)):
                super().record_ready(host, slot)

        def _watch(self) -> None:
            while not self.finished():
                self.silent_ranks.look()
                time.sleep(_LOOK_EVERY_S)

    return WatchingDriver


def listening_handler(handler_class: type[Any], silent_ranks: SilentRanks) -> type[Any]:
    """Return a handler of the elastic store that takes signs of life, and does not keep them."""

    class ListeningHandler(handler_class):
        def _put_value(self, scope: str, key: str, value: bytes) -> None:
            if scope != SCOPE:
                super()._put_value(scope, key, value)
                return
            host, _, local_rank = key.rpartition(":")
            if local_rank.isdecimal():
                silent_ranks.hear((host, int(local_rank)), value)

    return ListeningHandler


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
