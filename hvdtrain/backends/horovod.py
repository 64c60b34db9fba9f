"""Horovod: one replica in each process, collectives by its C++ engine."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.compiled import run_once
from hvdtrain.backends.protocol import Capabilities, ReduceOp
from hvdtrain.runtime.collectives import AxisCollectives, collective_name
from hvdtrain.runtime.session import Session


class HorovodExchange:
    """The exchange among the ranks of `collectives`."""

    def __init__(self, collectives: AxisCollectives) -> None:
        self._collectives = collectives
        self.size = collectives.size
        self.index = collectives.rank

    def _name(self, name: str) -> str:
        return collective_name(self._collectives.axis, name)

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Reduce over the ranks."""
        return self._collectives.all_reduce(
            tensor, name=self._name(name), op=op, prescale=prescale, postscale=postscale
        )

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum over the ranks, in messages that leave together."""
        return self._collectives.grouped_all_reduce(
            tensors, name=self._name(name), prescale=prescale, postscale=postscale
        )

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate the ranks' tensors along dim 0."""
        return self._collectives.all_gather(tensor, name=self._name(name))

    def reduce_scatter(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Sum over the ranks and return this rank's slice along dim 0."""
        return self._collectives.reduce_scatter(tensor, name=self._name(name))

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Send rank i the i-th of equal parts along dim 0, and concatenate what came."""
        return self._collectives.all_to_all(tensor, name=self._name(name))

    def broadcast(self, tensors: dict[str, tf.Variable], *, root: int = 0) -> None:
        """Give every rank the values of `root`, all in one compiled call so that names, not order, match them."""

        def assign_all() -> None:
            for path, variable in tensors.items():
                value = variable.read_value()
                name = self._name(f"broadcast/{path}")
                variable.assign(self._collectives.broadcast(value, root=root, name=name))

        run_once(assign_all)


class HorovodBackend(HorovodExchange):
    """Data parallel training over the ranks of a session."""

    name = "horovod"
    local_index = 0
    local_size = 1
    capabilities = Capabilities()
    roles: Mapping[str, int] = {}

    def __init__(self, session: Session, collectives: AxisCollectives) -> None:
        super().__init__(collectives)
        self._session = session
        self.size = session.mesh.size("dp")
        self.index = session.mesh.coordinate("dp")
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

    def gather_bytes(self, payload: bytes, *, timeout: float | None) -> list[bytes]:
        """Exchange `payload` over the control channel."""
        return self._session.gather(payload, timeout)

    def close(self) -> None:
        """Wait for all ranks and shut Horovod down."""
        self._session.close()
