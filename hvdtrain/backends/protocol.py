"""Protocols that a distribution backend implements for the training loop."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import tensorflow as tf

from hvdtrain.config.parallel import DATA_AXES, HOLDER_AXES, REPLICA_AXES
from hvdtrain.runtime.session import Session

ReduceOp = Literal["sum", "average", "adasum", "min", "max", "product"]
Among = Literal["job", "replicas", "holders", "data_parallel", "tp"]
"""`job`: all ranks.

`replicas`: ranks with my shard of the model, in the order of `index`. `holders`: of those, the ones with my experts and
tables (dp x cp). `data_parallel`: ranks with different samples, in the order of `process`. `tp`: my tensor-parallel
group.
"""
AXES_OF: Mapping[Among, tuple[str, ...]] = {
    "replicas": REPLICA_AXES,
    "holders": HOLDER_AXES,
    "data_parallel": DATA_AXES,
    "tp": ("tp",),
}
"""The mesh axes along which the members differ; of `job`: all."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities and requirements of a backend."""

    sends_together: bool = False
    """Gradients are reduced in one message, which must not be inside a conditional of the graph."""
    needs_builders: bool = False
    """Model and optimizer must be created within `Backend.scope`."""
    uneven: bool = False
    """Whether global batches may be uneven, as the number of replicas changes: see `data.batch.per_replica`."""
    asynchronous: bool = False
    """Workers take steps at their own pace; the loop sees one replica that takes whole batches."""
    shares_variables: bool = False
    """Replicas share one copy of each variable, which no forward pass may change."""
    step_factory: str = "hvdtrain.training.step.step_factory:KerasStepFactory"
    """`module:class` of the step factory."""


class HostSum(Protocol):
    """Two-level all-reduce: within each host, then between hosts."""

    def suits(self, tensor: tf.Tensor) -> bool:
        """Return whether tensors of this shape and dtype use two levels; replicas agree."""

    def sum(
        self, tensor: tf.Tensor, between: "Callable[[tf.Tensor, Collectives], tf.Tensor]", *, name: str
    ) -> tf.Tensor:
        """Reduce-scatter within the host, apply `between` across hosts, then all-gather."""


class Collectives(Protocol):
    """Collectives among replicas; usable in a compiled function under `Backend.run`."""

    @property
    def size(self) -> int:
        """Number of replicas."""

    @property
    def index(self) -> int:
        """This replica's index; outside of `Backend.run` that of the process's first replica."""

    @property
    def sends(self) -> bool:
        """Whether tensors go to other replicas, or to those that an elastic job adds."""

    @property
    def by_host(self) -> HostSum | None:
        """Two-level reduction of large tensors; None if all replicas communicate directly."""

    def all_reduce(
        self, tensor: tf.Tensor, *, name: str, op: ReduceOp = "sum", prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Reduce elementwise; the factors scale input and result. Collective."""

    def grouped_all_reduce(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """All-reduce several tensors in fused messages. Collective."""

    def reduce_scatter(
        self, tensor: tf.Tensor, *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> tf.Tensor:
        """Sum over the replicas and return this replica's shard of dim 0. Collective.

        Shards are consecutive; if dim 0 does not divide evenly, the first replicas keep one row more.
        """

    def grouped_reduce_scatter(
        self, tensors: Sequence[tf.Tensor], *, name: str, prescale: float = 1.0, postscale: float = 1.0
    ) -> list[tf.Tensor]:
        """Reduce-scatter several tensors of one dtype in fused messages. Collective."""

    def all_gather(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Concatenate along dim 0. Collective."""

    def grouped_all_gather(self, tensors: Sequence[tf.Tensor], *, name: str) -> list[tf.Tensor]:
        """All-gather several tensors of one dtype in fused messages. Collective."""

    def all_to_all(self, tensor: tf.Tensor, *, name: str) -> tf.Tensor:
        """Send dim 0's i-th equal part to replica i and concatenate. Collective."""

    def exchange_rows(self, tensor: tf.Tensor, rows: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Send `rows[i]` consecutive rows to replica i, equal parts if it is empty; return rows and their numbers."""

    def broadcast_value(self, tensor: tf.Tensor, *, root: int, name: str) -> tf.Tensor:
        """Return the tensor of the replica at index `root`, of the same shape and dtype on all."""


class Future(Protocol):
    """Result of a dispatched function."""

    def fetch(self) -> Any:
        """Wait for the result and return it, as NumPy arrays and numbers."""


class Workers(Protocol):
    """Processes that run compiled functions asynchronously for this one."""

    @property
    def count(self) -> int:
        """Number of workers."""

    def schedule(self, function: Callable[..., Any], *args: Any) -> Future:
        """Dispatch `function`, a `tf.function`, to the next free worker.

        Returns before the function has run, unless the queue is full.
        """

    def join(self) -> None:
        """Wait until every dispatched call has run."""


class Backend(Collectives, Protocol):
    """Interface between the training loop and a distribution engine.

    `size`, `index` and all collectives refer to the replicas: the processes that hold the same shard of the model and
    have different samples, or different positions of the same samples.
    """

    @property
    def session(self) -> Session:
        """This process's place in the job: its world, its link to the other ranks, its options."""

    @property
    def data_parallel(self) -> Collectives:
        """Collectives among replicas with different samples: they share a global batch."""

    @property
    def primary(self) -> bool:
        """Whether this process writes files and logs to the console (rank 0)."""

    @property
    def name(self) -> str:
        """Name, as in `--backend`."""

    @property
    def transport(self) -> str | None:
        """Transport, where there is a choice: `mpi`, `gloo`, `ring` …"""

    @property
    def process(self) -> int:
        """This process's index among the data readers; each reads its share of every global batch."""

    @property
    def processes(self) -> int:
        """Number of processes that read different samples."""

    @property
    def local_size(self) -> int:
        """Number of replicas per process."""

    @property
    def remarks(self) -> Sequence[str]:
        """Notes for the user about the transport, one per line."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities and requirements."""

    @property
    def roles(self) -> Mapping[str, int]:
        """Number of ranks per role, if roles differ; else empty."""

    def scope(self) -> AbstractContextManager[Any]:
        """Return the context in which model and optimizer are created."""

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` once per replica of this process, within a compiled function.

        Every replica gets the same `args` and selects its share by its index. Returns the first replica's result.
        """

    def prepare(self, optimizer: Any) -> None:
        """Make a Keras optimizer accept gradients that are already reduced."""

    @property
    def axes(self) -> Mapping[str, int]:
        """Sizes of the mesh axes with more than one rank."""

    @property
    def rank(self) -> int:
        """This process's rank in the job."""

    @property
    def job_size(self) -> int:
        """Number of ranks in the job; more than `processes` if a replica spans several ranks."""

    @property
    def everyone(self) -> Collectives:
        """Collectives among all ranks; within `run`, among replicas if these communicate."""

    def along(self, *axes: str) -> Collectives:
        """Return the collectives among ranks that differ only along `axes`."""

    def between(self, axis: str, here: int, there: int) -> Collectives:
        """Return the collectives of two neighbours: `here` and `there` along `axis`.

        The first and the last are neighbours, too.
        """

    def broadcast(self, tensors: Mapping[str, tf.Variable], *, root: int = 0, among: Among = "replicas") -> None:
        """Assign the values of member `root`, by path. Collective."""

    def gather_bytes(self, payload: bytes, *, timeout: float | None, among: Among = "job") -> list[bytes]:
        """Gather every rank's `payload` over the control channel. Collective over the whole job.

        Every rank must call it, whatever `among`. Waits for `timeout` seconds; None: the load timeout.
        """

    def close(self) -> None:
        """Shut down together with the other ranks. Collective."""


GATHER_TIMEOUT_S = 600.0
"""Seconds to wait for ranks that compute; a rank that fails ends the job at once."""


def gather(
    backend: Backend, value: Any, *, timeout: float | None = GATHER_TIMEOUT_S, among: Among = "job"
) -> list[Any]:
    """Gather every rank's `value`, of JSON types, over the control channel. Collective over the whole job.

    Args:
        value: this rank's; tuples arrive as lists.
        timeout: seconds to wait; None: the load timeout, for ranks that may still load their data.
        among: the ranks whose values are returned.
    """
    texts = backend.gather_bytes(json.dumps(value).encode(), timeout=timeout, among=among)
    return [json.loads(text) for text in texts]


def world_size(backend: Backend) -> int:
    """Return the number of participants: replicas, or ranks if roles differ or ranks share a replica."""
    return sum(backend.roles.values()) or max(backend.size, backend.job_size)


def split_axes(backend: Backend) -> dict[str, int]:
    """Return the mesh axes if the model is split, else none."""
    return dict(backend.axes) if set(backend.axes) - {"dp"} else {}


class OneReplica:
    """The half of a backend that runs steps, where a process has one replica and plain variables."""

    local_size = 1
    roles: Mapping[str, int] = {}

    def scope(self) -> AbstractContextManager[Any]:
        """Return a null context."""
        return nullcontext()

    def run(self, step: Callable[..., Any], *args: Any) -> Any:
        """Call `step` once."""
        return step(*args)

    def prepare(self, optimizer: Any) -> None:
        """No-op: Keras optimizers all-reduce under a strategy of tf.distribute only."""
