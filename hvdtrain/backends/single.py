"""Backend of one process with one replica: the reference for all others."""

from collections.abc import Mapping, Sequence

import tensorflow as tf

from hvdtrain.backends.protocol import Among, Capabilities, OneReplica, ReduceOp
from hvdtrain.runtime.session import Session


class NoOpCollectives:
    """Identity collectives; base class of backends."""

    transport: str | None = None
    size = 1
    index = 0
    local_size = 1
    primary = True
    axes: Mapping[str, int] = {}
    sends = False
    by_host = None
    remarks: Sequence[str] = ()

    @property
    def data_parallel(self) -> "NoOpCollectives":
        return self

    @property
    def process(self) -> int:
        return self.index

    @property
    def processes(self) -> int:
        return self.size

    @property
    def rank(self) -> int:
        return self.process

    @property
    def job_size(self) -> int:
        return self.processes

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        factor = prescale * postscale
        return tensor if factor == 1.0 else tensor * factor

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        return [self.all_reduce(t, name=name, prescale=prescale, postscale=postscale) for t in tensors]

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        return self.all_reduce(tensor, name=name, prescale=prescale, postscale=postscale)

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        return self.grouped_all_reduce(tensors, name=name, prescale=prescale, postscale=postscale)

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return tensor

    def grouped_all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        return list(tensors)

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        return tensor

    def exchange_rows(self, tensor: tf.Tensor, rows: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        return tensor, rows

    @property
    def everyone(self) -> "NoOpCollectives":
        return self

    def along(self, *axes: str) -> "NoOpCollectives":
        return NoOpCollectives()

    def between(self, axis: str, here: int, there: int) -> "NoOpCollectives":
        return NoOpCollectives()

    def broadcast_value(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        return tensor

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        """No-op."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        return [payload]


class SingleBackend(OneReplica, NoOpCollectives):
    """One process that takes whole batches."""

    name = "single"
    capabilities = Capabilities()

    def __init__(self, session: Session) -> None:
        self.session = session

    def close(self) -> None:
        self.session.close()
