"""Options of processes, threads and the exchange between ranks."""

from typing import Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section

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


@section
class RuntimeConfig:
    """Backend, threads and timeouts of a job."""

    backend: BackendName = "auto"
    """Distribution engine; auto: horovod under a launcher, else single."""
    replicas: int | None = None
    """Replicas of mirrored and central_storage; None: one per GPU, or 2 on the CPU."""
    communication: CommunicationName = "auto"
    """Transport of multi_worker_mirrored: ring (gRPC), nccl (GPUs), or auto: TensorFlow chooses."""
    parameter_servers: int | None = None
    """Number of parameter servers, the last ranks; rank 0 coordinates, those between train. None: 1."""
    threads: int | None = None
    """Threads per operation on each rank; None divides the cores among the ranks of a machine."""
    pin: bool = True
    """Pin each rank to its own cores if there are enough."""
    start_timeout: float = 120.0
    """Seconds to wait for the other ranks at the start."""
    load_timeout: float = 3600.0
    """Seconds to wait for ranks that still load, unpack or decode their data."""

    def __post_init__(self) -> None:
        if self.replicas is not None:
            if self.replicas < 1:
                raise ConfigError(f"--replicas must be at least 1. Received: {self.replicas}.")
            if self.backend not in WITH_REPLICAS:
                raise ConfigError(
                    f"--replicas is for {' and '.join(f'--backend={each}' for each in WITH_REPLICAS)}: "
                    f"--backend={self.backend} does not take it."
                )
        if self.communication != "auto" and self.backend != "multi_worker_mirrored":
            raise ConfigError(
                f"--communication is for --backend=multi_worker_mirrored: --backend={self.backend} does not take it."
            )
        if self.parameter_servers is not None:
            if self.parameter_servers < 1:
                raise ConfigError(f"--parameter-servers must be at least 1. Received: {self.parameter_servers}.")
            if self.backend != "parameter_server":
                raise ConfigError(
                    f"--parameter-servers is for --backend=parameter_server: --backend={self.backend} does not take it."
                )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads must be at least 1. Received: {self.threads}.")
        if not self.start_timeout > 0:
            raise ConfigError(f"--start-timeout must be positive. Received: {self.start_timeout}.")
        if not self.load_timeout > 0:
            raise ConfigError(f"--load-timeout must be positive. Received: {self.load_timeout}.")
