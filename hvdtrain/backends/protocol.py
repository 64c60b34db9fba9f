"""What a training loop needs of whoever distributes it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import tensorflow as tf

ReduceOp = Literal["sum", "average", "adasum"]
Among = Literal["job", "replicas", "holders", "data_parallel", "tp"]
"""Every process of the job; those that hold the same part of the model as this one, in the order of `index`; of these,
those that hold the same experts and tables too: along `dp` and `cp`; those that are given different samples, in the
order of `process`; or those that hold slices of the same layers for the same samples: along `tp`."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a backend can do, and what it needs."""

    lacks: tuple[str, ...] = ()
    """Names of the step's options that cannot be used."""
    sends_together: bool = False
    """Gradients leave in one message, which no condition of the graph may hold."""
    needs_builders: bool = False
    """Model and optimizer must be made within `Backend.scope`."""
    uneven: bool = False
    """Whether global batches need not divide among the replicas, whose number changes: see `data.batch.per_replica`."""
    asynchronous: bool = False
    """Workers take the steps, each at its own pace; to the loop they are one replica that takes whole batches."""
    step_factory: str = "hvdtrain.training.step.step_factory:CompiledStepFactory"
    """`module:class` of the factory whose steps this backend runs, for models without a step of their own."""


class HostSum(Protocol):
    """Sums in two levels: inside each host first, then between the hosts."""

    def suits(self, tensor: tf.Tensor) -> bool:
        """Tell whether tensors of this shape and dtype are added up so; alike on all replicas."""

    def sum(
        self, tensor: tf.Tensor, between: "Callable[[tf.Tensor, Collectives], tf.Tensor]", *, name: str
    ) -> tf.Tensor:
        """Sum inside the host, let `between` sum this replica's slice over the hosts, and gather the whole."""


class Collectives(Protocol):
    """Collectives among the replicas; usable within a compiled function, in what `Backend.run` calls."""

    @property
    def size(self) -> int:
        """Number of replicas."""

    @property
    def index(self) -> int:
        """This replica's place among them; outside of `Backend.run` that of this process's first."""

    @property
    def fuses(self) -> bool:
        """Whether tensors that are reduced at the same time may share a message."""

    @property
    def by_host(self) -> HostSum | None:
        """How large tensors are added up in two levels; None where all replicas exchange at once."""

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


class Pair(Protocol):
    """The collectives of two neighbouring ranks."""

    @property
    def index(self) -> int:
        """This rank's place: 0 or 1."""

    def broadcast_value(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Return the tensor that the rank at place `root` gave; both give one of the same shape and dtype."""


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

    `size` and `index`, and all collectives, are those of the replicas: the processes that hold the same part of the
    model and are given different samples, or different positions of the same samples.
    """

    @property
    def data_parallel(self) -> Collectives:
        """The collectives among the replicas that are given different samples: a global batch is divided among them."""

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
        """Number of processes that read different samples; together they hold all replicas that are given these."""

    @property
    def local_index(self) -> int:
        """This replica's place among those of its process; outside of `run` 0."""

    @property
    def local_size(self) -> int:
        """Number of replicas in each process."""

    @property
    def remarks(self) -> Sequence[str]:
        """What the user should know about how tensors travel, a line each."""

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

    @property
    def axes(self) -> Mapping[str, int]:
        """Sizes of the axes of the mesh that hold several ranks."""

    @property
    def rank(self) -> int:
        """This process's place among all processes of the job."""

    @property
    def job_size(self) -> int:
        """Number of processes of the job; more than `processes` where each replica of the model is split among some."""

    @property
    def everyone(self) -> Collectives:
        """The collectives among all processes of the job; within `run`, where it is the replicas that exchange."""

    def along(self, *axes: str) -> Collectives:
        """Return the collectives among the ranks of the job that differ from this one along `axes` of the mesh only."""

    def between(self, axis: str, here: int, there: int) -> Pair:
        """Return the collectives of this rank, at `here` along `axis`, and its neighbour at `there`.

        The first and the last are neighbours too.
        """

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        """Assign the values that member `root` has, by path."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        """Return the `payload` of every process, outside of TensorFlow.

        Every process of the job must call it, whoever is asked for. Waits for `timeout` seconds; None: for as long as
        the others may take to load their data.
        """

    def close(self) -> None:
        """Leave together with the other processes."""


def world_size(backend: Backend) -> int:
    """Return how many take part: replicas, or ranks where these have different roles or share a replica."""
    return sum(backend.roles.values()) or max(backend.size, backend.job_size)


def split_axes(backend: Backend) -> dict[str, int]:
    """Return the sizes of the mesh's axes if anything of the model is split along one of them."""
    return dict(backend.axes) if set(backend.axes) - {"dp"} else {}
