"""Options of backend, processes, threads and timeouts, and of elastic training."""

from dataclasses import KW_ONLY
from typing import Literal

from hvdtrain.config.errors import opt
from hvdtrain.config.options import applies_to, excludes, needs, option, section
from hvdtrain.config.parallel import parse_axes

BackendName = Literal[
    "auto",
    "horovod",
    "single",
    "mirrored",
    "multi_worker_mirrored",
    "central_storage",
    "one_device",
    "tpu",
    "parameter_server",
]
CommunicationName = Literal["auto", "ring", "nccl"]
HierarchyName = Literal["auto", "always", "never"]
MallocName = Literal["keep", "system"]
COMMIT_EVERY = 10
"""Default interval in steps: the most work that a lost rank costs.

Copying the state is cheap next to this many steps.
"""
WITH_REPLICAS: tuple[BackendName, ...] = ("mirrored", "central_storage")
"""Backends with several replicas in one process (`--replicas`)."""
IN_ONE_PROCESS: tuple[BackendName, ...] = ("single", *WITH_REPLICAS, "one_device", "tpu")
"""Backends of a single process."""
OF_TF_DISTRIBUTE: tuple[BackendName, ...] = (
    *WITH_REPLICAS,
    "multi_worker_mirrored",
    "one_device",
    "tpu",
    "parameter_server",
)
"""Backends that are strategies of tf.distribute."""
STRATEGIES = f"backend={'|'.join(OF_TF_DISTRIBUTE)}"
NOT_ON_STRATEGIES = excludes(STRATEGIES, instead=f"leave it out, or use {opt('backend', 'horovod')}")
NOT_WITH_SERVERS = excludes("backend=parameter_server", instead=f"leave it out, or use {opt('backend', 'horovod')}")
REPEATABLE = needs(
    *("update=all_reduce|local|hybrid", "max_staleness=0", "replay"),
    instead=f"{opt('record')} and {opt('replay')} repeat the order in which updates arrive",
)
ELEMENTWISE = f"use an elementwise optimizer such as SGD or Adam, and {opt('clip_norm')} in place of its own clipping"


@section
class RuntimeConfig:
    """Backend, threads and timeouts of a job."""

    _: KW_ONLY
    backend: BackendName = option("auto")
    """Distribution engine; auto: horovod under a launcher, else single."""
    replicas: int | None = option(None, "[1, inf)", applies_to(f"backend={'|'.join(WITH_REPLICAS)}"))
    """Replicas of mirrored and central_storage; None: one per GPU, or 2 on the CPU."""
    communication: CommunicationName = option("auto", applies_to("backend=multi_worker_mirrored"))
    """Transport of multi_worker_mirrored: ring (gRPC), nccl (GPUs), or auto (TensorFlow chooses)."""
    parameter_servers: int | None = option(None, "[1, inf)", applies_to("backend=parameter_server"))
    """Number of parameter servers, the last ranks; rank 0 coordinates, the others train. None: 1."""
    threads: int | None = option(None, "[1, inf)")
    """Threads per op on each rank; None divides the cores among the ranks of a host."""
    pin: bool = option(True)
    """Pin each rank to its own cores if there are enough."""
    start_timeout: float = option(120.0, "(0, inf]")
    """Seconds to wait for the other ranks at startup."""
    load_timeout: float = option(3600.0, "(0, inf]")
    """Seconds to wait for ranks that are still loading, unpacking or decoding data."""
    hang_timeout: float = option(300.0, "0 or [1, inf)")
    """Seconds without progress before a deadlocked job is ended; 0: never."""
    link_timeout: float = option(15.0, "0 or [5, inf)")
    """Seconds without a packet from another host before the job is ended; 0: never."""
    deterministic: bool = option(
        False,
        excludes(
            "backend=parameter_server",
            why="the order of its workers' steps is a matter of time",
            instead=f"leave it out, or use {opt('backend', 'horovod')}",
        ),
        REPEATABLE,
    )
    """Bitwise reproducible training: fixed messages, deterministic ops."""
    hierarchical_allreduce: HierarchyName = option(
        "auto",
        applies_to("backend=auto|horovod", when="always"),
        excludes("elastic", when="always", why="it needs hosts that stay", instead="leave it out"),
    )
    """Reduce gradients within each host first, then between hosts; auto: measure at startup."""
    parallel: str | None = option(None, valid=parse_axes)
    """Mesh axis sizes (pp, dp, cp, ep, tp), such as tp=2,pp=2; dp takes the remaining ranks."""
    malloc: MallocName = option("keep")
    """Keep freed memory in the process for the next step, or let glibc return it to the system."""


@section
class ElasticConfig:
    """Training that survives lost or joining ranks, under horovodrun's host discovery."""

    elastic: bool = option(False, applies_to("backend=auto|horovod"))
    """Resume from the last commit when ranks are lost, and admit new hosts: horovodrun --min-np … With --update async,
    gossip or easgd, go on without them: mpirun --enable-recovery.
    """
    commit_every: int = option(COMMIT_EVERY, "[1, inf)", applies_to("elastic"))
    """With --elastic: commit the state to host memory every N steps; new ranks join at commits."""
