"""Options of checkpoints."""

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section


@section
class CheckpointConfig:
    """When checkpoints are saved, and how many are kept."""

    checkpoint_every: int | None = None
    """Save every this many steps; None saves at the end of every epoch. The end of training always saves."""
    keep: int = 3
    """Number of checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ConfigError(f"--checkpoint-every must be at least 1. Received: {self.checkpoint_every}.")
        if self.keep < 1:
            raise ConfigError(f"--keep must be at least 1. Received: {self.keep}.")
