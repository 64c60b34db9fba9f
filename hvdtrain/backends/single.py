"""The backend of one process and one replica: the reference that every other one must match."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Among, Capabilities, ReduceOp
from hvdtrain.runtime.session import Session


class NoOpCollectives:
    """Every collective is the identity; a base of backends."""

    transport: str | None = None
    size = 1
    index = 0
    local_index = 0
    local_size = 1
    primary = True
    axes: Mapping[str, int] = {}
    fuses = True
    by_host = None
    remarks: Sequence[str] = ()

    @property
    def data_parallel(self) -> "NoOpCollectives":
        """It takes all samples."""
        return self

    @property
    def process(self) -> int:
        """The process is the replica."""
        return self.index

    @property
    def processes(self) -> int:
        """There are as many as replicas."""
        return self.size

    @property
    def rank(self) -> int:
        """The processes are those of the job."""
        return self.process

    @property
    def job_size(self) -> int:
        """The processes are those of the job."""
        return self.processes

    def distribute(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return `batches` as they are."""
        return batches

    def check_changing(self, variables: Mapping[str, tf.Variable]) -> None:
        """Take all: they are plain variables."""

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Return `tensor`, times the two factors."""
        factor = prescale * postscale
        return tensor if factor == 1.0 else tensor * factor

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Return `tensors`, times the two factors."""
        return [self.all_reduce(t, name=name, prescale=prescale, postscale=postscale) for t in tensors]

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Return `tensor`, times the two factors: its slice is the whole."""
        return self.all_reduce(tensor, name=name, prescale=prescale, postscale=postscale)

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Return `tensors`, times the two factors."""
        return self.grouped_all_reduce(tensors, name=name, prescale=prescale, postscale=postscale)

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Return `tensor`."""
        return tensor

    def grouped_all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Return `tensors`."""
        return list(tensors)

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Return `tensor`."""
        return tensor

    @property
    def everyone(self) -> "NoOpCollectives":
        """The replicas are the processes of the job."""
        return self

    def along(self, *axes: str) -> "NoOpCollectives":
        """Return the exchange of one rank."""
        return NoOpCollectives()

    def between(self, axis: str, here: int, there: int) -> "NoOpCollectives":
        """Return the exchange of one rank."""
        return NoOpCollectives()

    def broadcast_value(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Return `tensor`."""
        return tensor

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        """Leave everything as it is."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        """Return this process's payload alone."""
        return [payload]


class SingleBackend(NoOpCollectives):
    """The whole batch in this process."""

    name = "single"
    capabilities = Capabilities()
    roles: Mapping[str, int] = {}

    def __init__(self, session: Session) -> None:
        self._session = session

    def scope(self) -> AbstractContextManager[Any]:
        """No context is needed."""
        return nullcontext()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step`."""
        return step(*args)

    def prepare(self, optimizer: Any) -> None:
        """Leave it as it is."""

    def close(self) -> None:
        """End the session."""
        self._session.close()
