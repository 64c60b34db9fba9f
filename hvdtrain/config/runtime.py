"""Options of processes, threads and the exchange between ranks."""

from typing import Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section

BackendName = Literal["auto", "horovod", "single"]


@section
class RuntimeConfig:
    """How the ranks of a job work together on their machines."""

    backend: BackendName = "auto"
    """Who distributes the training; auto: horovod under a launcher, single otherwise."""
    threads: int | None = None
    """Threads an operation may use on each rank; None divides the cores among the ranks of a machine."""
    pin: bool = True
    """Pin each rank to its own cores where there are enough of them."""
    start_timeout: float = 120.0
    """Seconds to wait at the start for the other ranks."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"--threads must be at least 1. Received: {self.threads}.")
        if not self.start_timeout > 0:
            raise ConfigError(f"--start-timeout must be positive. Received: {self.start_timeout}.")
