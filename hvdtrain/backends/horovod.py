"""Horovod: one replica in each process, collectives by its C++ engine."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Capabilities
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.runtime.session import Session


class HorovodBackend(AxisCollectives):
    """Data parallel training over the ranks of a session."""

    name = "horovod"
    local_index = 0
    local_size = 1
    capabilities = Capabilities()
    roles: Mapping[str, int] = {}

    def __init__(self, session: Session) -> None:
        super().__init__(session.world.along("dp").group)
        self._session = session
        self.primary = session.world.primary
        self.process = self.index
        self.processes = self.size
        self.transport = session.environment.controller if self.size > 1 else None

    def scope(self) -> AbstractContextManager[Any]:
        """No context is needed: each process holds plain variables."""
        return nullcontext()

    def distribute(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return `batches`, which are this rank's already."""
        return batches

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step`: this process has one replica."""
        return step(*args)

    def prepare(self, optimizer: Any) -> None:
        """Leave it as it is: it knows of no replicas."""

    def check_changing(self, variables: Mapping[str, tf.Variable]) -> None:
        """Take all: they are plain variables."""

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, axis: str = "dp") -> None:
        """Assign the values of member `root` along `axis`."""
        if axis == "dp":
            super().broadcast(tensors, root=root)
        else:
            self._session.world.along(axis).broadcast(tensors, root=root)

    def gather_bytes(self, payload: bytes, *, timeout: float | None, axis: str = "dp") -> list[bytes]:
        """Exchange `payload` over the control channel."""
        return self._session.gather(payload, timeout, axis)

    def close(self) -> None:
        """Wait for all ranks and shut Horovod down."""
        self._session.close()
