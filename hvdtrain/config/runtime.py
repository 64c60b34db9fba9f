"""Options of backend, processes, threads and timeouts."""

import math
from dataclasses import KW_ONLY
from typing import Literal, get_args

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.section import section

BackendName = Literal[
    "auto",
    "horovod",
    "single",
    "mirrored",
    "multi_worker_mirrored",
    "one_device",
    "tpu",
    "parameter_server",
]
CommunicationName = Literal["auto", "ring", "nccl"]
HierarchyName = Literal["auto", "always", "never"]
MallocName = Literal["keep", "system"]
WITH_REPLICAS: tuple[BackendName, ...] = ("mirrored",)
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


@section
class RuntimeConfig:
    """Backend, threads and timeouts of a job."""

    _: KW_ONLY
    backend: BackendName = "auto"
    """Distribution engine; auto: horovod under a launcher, else single."""
    replicas: int | None = None
    """Replicas of mirrored; None: one per GPU, or 2 on the CPU."""
    communication: CommunicationName = "auto"
    """Transport of multi_worker_mirrored: ring (gRPC), nccl (GPUs), or auto (TensorFlow chooses)."""
    parameter_servers: int | None = None
    """Number of parameter servers, the last ranks; rank 0 coordinates, the others train. None: 1."""
    threads: int | None = None
    """Threads per op on each rank; None divides the cores among the ranks of a host."""
    pin: bool = True
    """Pin each rank to its own cores if there are enough."""
    start_timeout: float = 120.0
    """Seconds to wait for the other ranks at startup."""
    load_timeout: float = 3600.0
    """Seconds to wait for ranks that are still loading, unpacking or decoding data."""
    hang_timeout: float = 300.0
    """Seconds without progress before a deadlocked job is ended; 0: never."""
    link_timeout: float = 15.0
    """Seconds without a packet from another host before the job is ended; 0: never."""
    deterministic: bool = False
    """Bitwise reproducible training: fixed messages, deterministic ops."""
    hierarchical_allreduce: HierarchyName = "auto"
    """Reduce gradients within each host first, then between hosts; auto: measure at startup."""
    parallel: str | None = None
    """Mesh axis sizes (pp, dp, cp, ep, tp), such as tp=2,pp=2; dp takes the remaining ranks."""
    malloc: MallocName = "keep"
    """Keep freed memory in the process for the next step, or let glibc return it to the system."""

    def __post_init__(self) -> None:
        parse_axes(self.parallel)
        if self.replicas is not None:
            if self.replicas < 1:
                raise ConfigError(f"{opt('replicas')} must be at least 1. Received: {self.replicas}.")
            if self.backend not in WITH_REPLICAS:
                raise ConfigError(
                    f"{opt('replicas')} is for {' and '.join(opt('backend', each) for each in WITH_REPLICAS)}: "
                    f"{opt('backend', self.backend)} does not take it."
                )
        if self.communication != "auto" and self.backend != "multi_worker_mirrored":
            raise ConfigError(
                f"{opt('communication')} is for {opt('backend', 'multi_worker_mirrored')}: "
                f"{opt('backend', self.backend)} does not take it."
            )
        if self.hierarchical_allreduce not in get_args(HierarchyName):
            raise ConfigError(
                f"{opt('hierarchical_allreduce')} must be one of {', '.join(get_args(HierarchyName))}. "
                f"Received: {self.hierarchical_allreduce!r}."
            )
        if self.hierarchical_allreduce == "always" and self.backend not in ("auto", "horovod"):
            raise ConfigError(
                f"{opt('hierarchical_allreduce', 'always')} is for {opt('backend', 'horovod')}: "
                f"{opt('backend', self.backend)} does not take it."
            )
        if self.malloc not in get_args(MallocName):
            raise ConfigError(
                f"{opt('malloc')} must be one of {', '.join(get_args(MallocName))}. Received: {self.malloc!r}."
            )
        if self.parameter_servers is not None:
            if self.parameter_servers < 1:
                raise ConfigError(f"{opt('parameter_servers')} must be at least 1. Received: {self.parameter_servers}.")
            if self.backend != "parameter_server":
                raise ConfigError(
                    f"{opt('parameter_servers')} is for {opt('backend', 'parameter_server')}: "
                    f"{opt('backend', self.backend)} does not take it."
                )
        if self.deterministic and self.backend == "parameter_server":
            raise ConfigError(
                f"{opt('deterministic')} is not for {opt('backend', 'parameter_server')}: the order of its workers' "
                "steps is a matter of "
                f"time. Leave it out, or use {opt('backend', 'horovod')}."
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"{opt('threads')} must be at least 1. Received: {self.threads}.")
        if not self.start_timeout > 0:
            raise ConfigError(f"{opt('start_timeout')} must be positive. Received: {self.start_timeout}.")
        if not self.load_timeout > 0:
            raise ConfigError(f"{opt('load_timeout')} must be positive. Received: {self.load_timeout}.")
        if not (self.hang_timeout == 0 or 1 <= self.hang_timeout < math.inf):
            raise ConfigError(
                f"{opt('hang_timeout')} must be at least 1 second, or 0 for none. Received: {self.hang_timeout}."
            )
        if not (self.link_timeout == 0 or 5 <= self.link_timeout < math.inf):
            raise ConfigError(
                f"{opt('link_timeout')} must be at least 5 seconds, or 0 for none. Received: {self.link_timeout}."
            )
