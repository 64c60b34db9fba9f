"""A worker's connection to the servers."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hvdtrain.runtime.messages import Messages
from hvdtrain.training.update_rules.servers.layout import HEADER, PULL, PUSH, TICKET, ServerLayout
from hvdtrain.training.update_rules.servers.server import PARTS, TICKETS, TO_SERVER, TO_WORKER


class Pulled(NamedTuple):
    """Values of one server's variables: flat, and of tables the rows that have changed."""

    flats: list[np.ndarray]
    rows: list[tuple[np.ndarray, np.ndarray]]


class Connection:
    """Pushes to and pulls from all servers. One thread pushes and pulls, another one may take slices."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.layouts: Sequence[ServerLayout] = []
        """Of each server; one that owns nothing is not asked."""
        self.versions = [0] * messages.size
        """Of each server, the version of the parameters that this worker has."""
        self.asked = False
        """Whether a pull was asked for, and not received yet."""

    def push(self, step: int, share: float, weight: float, arrays: Sequence[Sequence[np.ndarray]]) -> None:
        """Send each server its gradients of `step`; none for a `weight` of 0."""
        for server, parts in enumerate(arrays):
            if not self.layouts[server].entries:
                continue
            self._send(server, PUSH, step, version=self.versions[server], share=share, weight=weight)
            self._messages.send(server, PARTS, *parts)

    def ask(self, step: int) -> None:
        """Ask for the parameters of `step`."""
        for server, version in enumerate(self.versions):
            if self.layouts[server].entries:
                self._send(server, PULL, step, version=version)
        self.asked = True

    def pulled(self) -> list[Pulled]:
        """Wait for the parameters that were asked for."""
        self.asked = False
        return [self._pulled_from(server, layout) for server, layout in enumerate(self.layouts)]

    def take_slice(self, era: int, first: int) -> int:
        """Return the number of the next slice that nobody has taken in this era, whose first one is `first`."""
        ticket = np.zeros(1, np.int64)
        self._send(0, TICKET, era, version=first)
        self._messages.receive(0, TICKETS, ticket)
        return int(ticket[0])

    def _pulled_from(self, server: int, layout: ServerLayout) -> Pulled:
        if not layout.entries:
            return Pulled([], [])
        header, flats = np.zeros(1, HEADER), layout.flat_buffers(layout.whole)
        for array in (header, *flats):
            self._messages.receive(server, TO_WORKER, array)
        rows = []
        for entry in layout.tables:
            count = np.zeros(1, np.int64)
            self._messages.receive(server, TO_WORKER, count)
            indices, values = np.empty(count[0], np.int64), np.empty((count[0], *entry.shape[1:]), entry.dtype)
            for array in (indices, values):
                self._messages.receive(server, TO_WORKER, array)
            rows.append((indices, values))
        self.versions[server] = int(header[0]["version"])
        return Pulled(flats, rows)

    def _send(
        self, server: int, kind: int, step: int, *, version: int, share: float = 0.0, weight: float = 0.0
    ) -> None:
        self._messages.send(server, TO_SERVER, np.array([(kind, step, version, share, weight)], HEADER))
