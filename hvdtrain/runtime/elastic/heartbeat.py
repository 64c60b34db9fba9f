"""Signs of life that the ranks of an elastic job give to `horovodrun`, which gives up ranks that fall silent."""

import contextlib
import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.store import Store
from hvdtrain.runtime.tuning import GLOO_PATIENCE

SCOPE = "heartbeat"
"""Scope of these messages in the store of `horovodrun` (its patch `silent-ranks`); the key is HOST:LOCAL_RANK."""
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True)
class Beat:
    """What a rank tells of its job with each sign of life."""

    lost_after: float
    """Seconds of silence after which a rank counts as lost."""
    start_timeout: float
    """Seconds that a rank which has just been started has for its first sign."""

    def encode(self) -> bytes:
        """Return the beat as bytes."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, message: bytes) -> "Beat":
        """Return the beat of a message.

        Raises:
            ValueError, TypeError, KeyError: it is none.
        """
        values = json.loads(message)
        return cls(float(values["lost_after"]), float(values["start_timeout"]))


class Heartbeat:
    """A thread that gives signs of life for as long as the process lives, also between two worlds.

    Args:
        environ: of the process.
        start_timeout: see `Beat`.
    """

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
        while not self._stopped.wait(self._beat()):
            continue

    def _beat(self) -> float:
        """Give a sign, and return the seconds until the next; Gloo counts the same seconds of silence."""
        beat = Beat(float(self._environ[GLOO_PATIENCE]), self._start_timeout)
        with contextlib.suppress(LaunchError):  # the next one may arrive
            self._store.put(SCOPE, place_of(self._environ), beat.encode())
        return min(_LONGEST_PAUSE_S, beat.lost_after / 4)


def place_of(environ: Mapping[str, str]) -> str:
    """Return the name by which `horovodrun` knows this process: HOST:LOCAL_RANK."""
    return f"{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}"
