"""Dry-run backend: one rank of a job that is not launched.

A trainer can be constructed on it and refuses the same options as in the job; it cannot train.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import AXES_OF, Among, Capabilities, OneReplica
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.config.parallel import DATA_AXES, REPLICA_AXES
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.devices import DevicePlan
from hvdtrain.runtime.failures import FailFast
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.link import Link, Watchdog
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.session import Session, current, has_session, set_current
from hvdtrain.runtime.world import World


class PlannedCollectives(NoOpCollectives):
    """Collectives of `size` identical ranks: results have the shapes of the real ones."""

    def __init__(self, size: int, index: int) -> None:
        self.size, self.index = size, index

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return tf.concat([tensor] * self.size, 0)

    def grouped_all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return [self.all_gather(tensor, name=name) for tensor in tensors]


class PlannedWorld(World):
    """World of a job that is not launched."""

    def along(self, *axes: str) -> Any:
        return PlannedCollectives(self.mesh.size(*axes), self.mesh.coordinate(*axes))


class PlannedBackend(OneReplica, PlannedCollectives):
    """Horovod's backend in a job that is not launched."""

    name = "horovod"
    capabilities = Capabilities()

    def __init__(self, session: Session) -> None:
        self.session = session
        self._mesh = session.world.mesh
        super().__init__(self._mesh.size(*REPLICA_AXES), self._mesh.coordinate(*REPLICA_AXES))
        self.axes = {axis: self._mesh.size(axis) for axis in self._mesh.named(self._mesh.axis_names)}
        self.primary = self.rank == 0

    @property
    def data_parallel(self) -> PlannedCollectives:
        return self.along(*DATA_AXES)

    @property
    def process(self) -> int:
        return self.data_parallel.index

    @property
    def processes(self) -> int:
        return self.data_parallel.size

    @property
    def rank(self) -> int:
        return self._mesh.rank

    @property
    def job_size(self) -> int:
        return self._mesh.size(*self._mesh.axis_names)

    @property
    def everyone(self) -> PlannedCollectives:
        return PlannedCollectives(self.job_size, self.rank)

    def along(self, *axes: str) -> PlannedCollectives:
        return PlannedCollectives(self._mesh.size(*axes), self._mesh.coordinate(*axes))

    def between(self, axis: str, here: int, there: int) -> PlannedCollectives:
        return PlannedCollectives(2, int(here > there))

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        return [payload] * (self.job_size if among == "job" else self._mesh.size(*AXES_OF[among]))

    def close(self) -> None:
        """No-op."""


@contextmanager
def planned(config: RuntimeConfig, mesh: Mesh) -> Iterator[PlannedBackend]:
    """Act as a rank of `mesh` inside the context, without a job."""
    ranks = mesh.size(*mesh.axis_names)
    environment = replace(detect_environment({}), controller="mpi", rank=mesh.rank, size=ranks)
    control, before = ControlChannel(), current() if has_session() else None
    collectives: Any = {"job": PlannedCollectives(ranks, mesh.rank)}
    world = PlannedWorld(mesh=mesh, hosts=(environment.hostname,) * ranks, collectives=collectives)
    link = Link(environment, control, Watchdog(control, FailFast()))
    session = Session(link=link, world=world, plan=DevicePlan((), 1, False), config=config)
    set_current(session)
    try:
        yield PlannedBackend(session)
    finally:
        set_current(before)
