"""Hosts that come and go, as `horovodrun` tells them to rank 0."""

import threading
from typing import Any


class HostsChangedError(Exception):
    """The hosts of the job have changed: this world ends, and nothing of it is lost."""


class HostNotices:
    """Hears what `horovodrun` says of hosts, by Horovod's own notification service.

    Only the process that is rank 0 when the hosts change is told so, and any may be.
    """

    def __init__(self) -> None:
        self._changed = threading.Event()

    def listen(self) -> None:
        """Begin to listen, for as long as the process lives; may be called again."""
        from horovod.common.elastic import notification_manager

        notification_manager.init()
        notification_manager.register_listener(self)

    def forget(self) -> None:
        """Forget what was said: a world begins that is made from what is known by now."""
        self._changed.clear()

    @property
    def changed(self) -> bool:
        """Whether the hosts have changed since this world began."""
        return self._changed.is_set()

    def on_hosts_updated(self, timestamp: int, update_res: Any) -> None:
        """Note that they have; called by Horovod, on a thread of its own."""
        self._changed.set()
