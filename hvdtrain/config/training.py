"""Options of the training loop."""

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section
from hvdtrain.config.step import StepConfig


@section
class TrainingConfig(StepConfig):
    """How long training runs and what makes it repeatable."""

    epochs: int = 10
    """Passes over the training samples."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even within an epoch."""
    steps_per_epoch: int | None = None
    """Steps of an epoch, for data of --data PACKAGE.MODULE:FUNCTION that never end."""
    validation_steps: int | None = None
    """Batches of an evaluation, for validation data of --data PACKAGE.MODULE:FUNCTION that never end."""
    seed: int = 0
    """Initial weights, sample order and dropout are functions of it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 1:
            raise ConfigError(f"{opt('epochs')} must be at least 1. Received: {self.epochs}.")
        for name in ("max_steps", "steps_per_epoch", "validation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{opt(name)} must be at least 1. Received: {value}.")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"{opt('seed')} must lie in [0, 2^31). Received: {self.seed}.")
