"""Horovod backend: one replica, or a shard of one, per process."""

from collections.abc import Mapping

import tensorflow as tf

from hvdtrain.backends.protocol import AXES_OF, Among, Capabilities, OneReplica
from hvdtrain.config.parallel import DATA_AXES, REPLICA_AXES
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.runtime.session import Session


class HorovodBackend(OneReplica, AxisCollectives):
    """Horovod backend; its own collectives are among the replicas."""

    name = "horovod"

    def __init__(self, session: Session) -> None:
        super().__init__(session.world.along(*REPLICA_AXES).group)
        self.session = session
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

    @property
    def everyone(self) -> AxisCollectives:
        return self.session.world.everyone if self.job_size > self.processes else self

    def along(self, *axes: str) -> AxisCollectives:
        return self.session.world.along(*axes)

    def between(self, axis: str, here: int, there: int) -> AxisCollectives:
        return self.session.world.between(axis, here, there)

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        self._members(among).broadcast(tensors, root=root)

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        return self.session.gather(payload, timeout, None if among == "job" else self._members(among).group.ranks)

    def _members(self, among: Among) -> AxisCollectives:
        return self.session.world.everyone if among == "job" else self.along(*AXES_OF[among])

    def close(self) -> None:
        self.session.close()
