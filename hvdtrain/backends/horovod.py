"""Horovod: one replica, or a part of one, in each process, collectives by its C++ engine."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Among, Capabilities
from hvdtrain.config.parallel import DATA_AXES, HOLDER_AXES, REPLICA_AXES
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.runtime.session import Session


class HorovodBackend(AxisCollectives):
    """Training over the ranks of a session; its collectives are those of the replicas, see `Backend`."""

    name = "horovod"
    local_index = 0
    local_size = 1
    roles: Mapping[str, int] = {}

    def __init__(self, session: Session) -> None:
        super().__init__(session.world.along(*REPLICA_AXES).group)
        self._session = session
        self.capabilities = Capabilities(uneven=session.elastic)
        self.primary = session.world.primary
        mesh = session.world.mesh
        self.axes = {axis: mesh.size(axis) for axis in mesh.named(mesh.axis_names)}
        self.rank = session.world.rank
        self.job_size = session.world.size
        self.remarks = session.world.remarks
        self.data_parallel = session.world.along(*DATA_AXES)
        self.process = self.data_parallel.index
        self.processes = self.data_parallel.size
        self.transport = session.environment.controller if self.job_size > 1 else None

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

    @property
    def everyone(self) -> AxisCollectives:
        """The collectives among all ranks of the session's world."""
        return self._session.world.everyone if self.job_size > self.processes else self

    def along(self, *axes: str) -> AxisCollectives:
        """Return the collectives of the session's world."""
        return self._session.world.along(*axes)

    def between(self, axis: str, here: int, there: int) -> AxisCollectives:
        """Return the collectives of the session's world."""
        return self._session.world.between(axis, here, there)

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        """Assign the values of member `root`."""
        if among == "replicas":
            super().broadcast(tensors, root=root)
        elif among == "job":
            self._session.world.everyone.broadcast(tensors, root=root)
        else:
            self._group_of(among).broadcast(tensors, root=root)

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        """Exchange `payload` over the control channel."""
        return self._session.gather(payload, timeout, self._members(among))

    def _members(self, among: Among) -> tuple[int, ...] | None:
        """Return the ranks of a group; None for all."""
        if among == "job":
            return None
        if among == "replicas":
            return self.group.ranks
        return self._group_of(among).group.ranks

    def _group_of(self, among: Among) -> AxisCollectives:
        axes: dict[Among, tuple[str, ...]] = {"holders": HOLDER_AXES, "data_parallel": DATA_AXES, "tp": ("tp",)}
        return self.along(*axes[among])

    def close(self) -> None:
        """Wait for all ranks and shut Horovod down."""
        self._session.close()
