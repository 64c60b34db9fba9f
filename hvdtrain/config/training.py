"""Options of the training loop."""

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section
from hvdtrain.config.step import StepConfig


@section
class TrainingConfig(StepConfig):
    """How long training runs and what makes it repeatable."""

    epochs: int = 10
    """Passes over the training samples."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even within an epoch."""
    seed: int = 0
    """Initial weights, sample order and dropout are functions of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 1:
            raise ConfigError(f"--epochs must be at least 1. Received: {self.epochs}.")
        if self.max_steps is not None and self.max_steps < 1:
            raise ConfigError(f"--max-steps must be at least 1. Received: {self.max_steps}.")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"--seed must lie in [0, 2^31). Received: {self.seed}.")
