"""What a training loop needs of whoever distributes it."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import tensorflow as tf

ReduceOp = Literal["sum", "average", "adasum"]


class Exchange(Protocol):
    """Collectives among the replicas; usable within a compiled function."""

    @property
    def size(self) -> int:
        """Number of replicas."""

    @property
    def index(self) -> int:
        """This replica's place among them."""

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Reduce elementwise over the replicas; the factors multiply input and result."""

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum several tensors in messages that leave together."""

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate along dim 0."""

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Send the i-th of equal parts along dim 0 to replica i, and concatenate what came."""


class Backend(Exchange, Protocol):
    """The seam between the loop and its distribution engine."""

    @property
    def name(self) -> str:
        """The backend's name, as `--backend` takes it."""

    def scope(self) -> AbstractContextManager[Any]:
        """The context in which model and optimizer are created."""

    def distribute(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Hand this process's batches to its replicas."""

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` once for each replica of this process, within a compiled function."""

    def broadcast(self, tensors: dict[str, tf.Variable], *, root: int = 0) -> None:
        """Give every replica the values that replica `root` has, by path."""

    def gather_bytes(self, payload: bytes, *, timeout: float) -> list[bytes]:
        """Return every process's `payload`, in rank order, outside of TensorFlow."""

    def close(self) -> None:
        """Leave together with the other processes."""
