"""The loop over the worlds of an elastic job, as one process goes through it."""

import hashlib
import os
import sys
import time
from collections.abc import MutableMapping

from hvdtrain.config.errors import MissingRankError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.consequences import is_consequence
from hvdtrain.runtime.control.channel import ControlChannel, end_process
from hvdtrain.runtime.elastic.engine import NoPlaceError, take_next_place
from hvdtrain.runtime.elastic.heartbeat import Heartbeat
from hvdtrain.runtime.elastic.hosts import HostNotices, HostsChangedError
from hvdtrain.runtime.tuning import GLOO_PATIENCE

_NO_PLACE = 1
"""Exit code, at which horovodrun does not look where it has taken the host out of the job itself."""
_LOOKS, _PAUSE_S = 5, 0.1
"""A rank that fails reports it before its exchanges break, but the store may be slow to answer."""


class Worlds:
    """The worlds that this process takes part in, one after another.

    Args:
        environ: of the process; its place in each world is written there.
    """

    def __init__(self, environ: MutableMapping[str, str] = os.environ) -> None:
        self._environ = environ
        self._hosts = HostNotices()
        self.entered = 0
        """Worlds that this process has been in, this one included."""
        self.trained = False
        """Whether the elastic training of a script has begun."""
        self.training = False
        """Whether an elastic training is under way, which goes on without ranks that are lost."""

    def enter(self, start_timeout: float) -> None:
        """Take this rank's place in the next world; a process for which there is none ends.

        The first place is in the environment already.

        Args:
            start_timeout: seconds that ranks wait for those that have just been started.
        """
        if not self.entered:
            Heartbeat(self._environ, start_timeout).start()
        self._hosts.forget()
        if self.entered:
            try:
                take_next_place(self._environ, RuntimeConfig.load_timeout)
            except NoPlaceError as error:
                print(f"hvdtrain: {error}", file=sys.stderr)
                end_process(_NO_PLACE)
        self.entered += 1
        self._hosts.listen()

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

    @property
    def hosts_changed(self) -> bool:
        """Whether hosts have come or gone since this world began; the launcher tells rank 0 alone."""
        return self._hosts.changed


def is_over(error: BaseException, control: ControlChannel) -> bool:
    """Tell whether `error` ends this world and not the job: a rank was lost, or the hosts have changed.

    A rank that was lost has reported nothing. What a rank reports is a mistake, which another world would only repeat.
    """
    if isinstance(error, HostsChangedError):
        return True
    return (isinstance(error, MissingRankError) or is_consequence(error)) and not _reported(control)


def _reported(control: ControlChannel) -> bool:
    for _ in range(_LOOKS):
        if control.failures():
            return True
        time.sleep(_PAUSE_S)
    return False
