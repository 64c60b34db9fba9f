"""What a training loop needs of whoever distributes it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import tensorflow as tf

ReduceOp = Literal["sum", "average", "adasum"]


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do, and what it needs."""

    lacks: tuple[str, ...] = ()
    """Names of the step's options that cannot be used."""
    sends_together: bool = False
    """Gradients leave in one message, which no condition of the graph may hold."""
    needs_builders: bool = False
    """Model and optimizer must be made within `Backend.scope`."""
    asynchronous: bool = False
    """Workers take the steps, each at its own pace; to the loop they are one replica that takes whole batches."""
    step_factory: str = "hvdtrain.training.step.step_factory:CompiledStepFactory"
    """`module:class` of the factory whose steps this backend runs, for models without a step of their own."""


class Collectives(Protocol):
    """Collectives among the replicas; usable within a compiled function, in what `Backend.run` calls."""

    @property
    def size(self) -> int:
        """Number of replicas."""

    @property
    def index(self) -> int:
        """This replica's place among them; outside of `Backend.run` that of this process's first."""

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Reduce elementwise over the replicas; the factors multiply input and result."""

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Sum several tensors in messages that leave together."""

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Sum over the replicas, of which each keeps its slice of dim 0.

        Slices are consecutive; where they cannot be equal, the first replicas keep one row more than the last.
        """

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Do so for several tensors of one dtype, in messages that leave together."""

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate along dim 0."""

    def grouped_all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """Do so for several tensors of one dtype, in messages that leave together."""

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Send the i-th of equal parts along dim 0 to replica i, and concatenate what came."""


class Future(Protocol):
    """What a compiled function returns once it has run."""

    def fetch(self) -> Any:
        """Wait for it, and return it with NumPy arrays and numbers for tensors."""


class Workers(Protocol):
    """Processes that run compiled functions for this one, each by itself and at its own pace."""

    @property
    def count(self) -> int:
        """Their number."""

    def schedule(self, function: Callable[..., Any], *args: Any) -> Future:
        """Let the next worker that is free call `function`, a `tf.function`, with `args` of tensors.

        It returns before the function has run, unless very many are waiting.
        """

    def join(self) -> None:
        """Wait until everything that was scheduled has run."""


class Backend(Collectives, Protocol):
    """The seam between the loop and its distribution engine.

    `size` and `index`, and all collectives, are those of the data parallel axis.
    """

    @property
    def primary(self) -> bool:
        """Whether this process writes the run's files and speaks to the user."""

    @property
    def name(self) -> str:
        """The backend's name, as `--backend` takes it."""

    @property
    def transport(self) -> str | None:
        """What tensors travel over, where there is a choice: `mpi`, `gloo`, `ring` …"""

    @property
    def process(self) -> int:
        """This process's place among those that read data: each reads its part of every global batch."""

    @property
    def processes(self) -> int:
        """Number of processes; as many as there are replicas, or one that holds all of them."""

    @property
    def local_index(self) -> int:
        """This replica's place among those of its process; outside of `run` 0."""

    @property
    def local_size(self) -> int:
        """Number of replicas in each process."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do, and what it needs of model, optimizer and step."""

    @property
    def roles(self) -> Mapping[str, int]:
        """How many of the job's ranks are what, where they have different roles; else empty."""

    def scope(self) -> AbstractContextManager[Any]:
        """The context in which model and optimizer are created."""

    def distribute(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Hand this process's batches to its replicas."""

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` once for each replica of this process, within a compiled function.

        Every replica is given `args`: what is its own it finds by its place. Returns what the first one returned.
        """

    def prepare(self, optimizer: Any) -> None:
        """Let a Keras optimizer apply gradients that were reduced already."""

    def check_changing(self, variables: Mapping[str, tf.Variable]) -> None:
        """Refuse variables, by path, that the model changes in its forward pass, where that cannot be done."""

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, axis: str = "dp") -> None:
        """Assign the values that member `root` along `axis` has, by path."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None, axis: str = "dp") -> list[bytes]:
        """Return the `payload` of every process along `axis`, in its order, outside of TensorFlow.

        Every process of the job must call it. Waits for `timeout` seconds; None: for as long as the others may take to
        load their data.
        """

    def close(self) -> None:
        """Leave together with the other processes."""


def world_size(backend: Backend) -> int:
    """Return how many take part: replicas, or ranks where these have different roles."""
    return sum(backend.roles.values()) or backend.size
