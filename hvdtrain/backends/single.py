"""Backend of one process with one replica: the reference for all others."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Among, Capabilities, ReduceOp
from hvdtrain.runtime.session import Session


class NoOpCollectives:
    """Identity collectives; base class of backends."""

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
        """Itself: it gets all samples."""
        return self

    @property
    def process(self) -> int:
        """Same as `index`."""
        return self.index

    @property
    def processes(self) -> int:
        """Same as `size`."""
        return self.size

    @property
    def rank(self) -> int:
        """Same as `process`."""
        return self.process

    @property
    def job_size(self) -> int:
        """Same as `processes`."""
        return self.processes

    def distribute(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return `batches` unchanged."""
        return batches

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Return `tensor`, scaled."""
        factor = prescale * postscale
        return tensor if factor == 1.0 else tensor * factor

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Return `tensors`, scaled."""
        return [self.all_reduce(t, name=name, prescale=prescale, postscale=postscale) for t in tensors]

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Return `tensor`, scaled: its shard is the whole."""
        return self.all_reduce(tensor, name=name, prescale=prescale, postscale=postscale)

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Return `tensors`, scaled."""
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

    def exchange_rows(self, tensor: tf.Tensor, rows: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Return `tensor`, all of whose rows stay here, and `rows`."""
        return tensor, rows

    @property
    def everyone(self) -> "NoOpCollectives":
        """Itself."""
        return self

    def along(self, *axes: str) -> "NoOpCollectives":
        """Return one-rank collectives."""
        return NoOpCollectives()

    def between(self, axis: str, here: int, there: int) -> "NoOpCollectives":
        """Return one-rank collectives."""
        return NoOpCollectives()

    def broadcast_value(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Return `tensor`."""
        return tensor

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        """No-op."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        """Return this process's payload alone."""
        return [payload]


class SingleBackend(NoOpCollectives):
    """One process that takes whole batches."""

    name = "single"
    capabilities = Capabilities()
    roles: Mapping[str, int] = {}

    def __init__(self, session: Session) -> None:
        self._session = session

    def scope(self) -> AbstractContextManager[Any]:
        """Return a null context."""
        return nullcontext()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` once."""
        return step(*args)

    def prepare(self, optimizer: Any) -> None:
        """No-op."""

    def close(self) -> None:
        """End the session."""
        self._session.close()
