"""Options of what a run reports."""

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section


@section
class ObservabilityConfig:
    """What a run records."""

    log_every: int = 10
    """Steps between two logged steps."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    plots: bool = True
    """Draw curves.png at the end."""

    def __post_init__(self) -> None:
        if self.log_every < 1:
            raise ConfigError(f"--log-every must be at least 1. Received: {self.log_every}.")
