"""Options of the optimizer and its learning rate."""

import math
from dataclasses import field
from typing import Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import Scalar
from hvdtrain.config.section import section


@section
class OptimConfig:
    """Which optimizer moves the parameters, and how fast."""

    optimizer: str = "adam"
    """Name of a Keras optimizer, in lower case."""
    optimizer_args: dict[str, Scalar] = field(default_factory=dict)
    """Further arguments of the optimizer, as NAME VALUE pairs."""
    learning_rate: float = 1e-3
    """Peak learning rate; it is used as given, whatever the number of ranks."""
    schedule: Literal["constant", "cosine"] = "constant"
    """How the learning rate moves after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from zero to its peak."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"--learning-rate must be a positive number. Received: {self.learning_rate}.")
        if self.warmup_steps < 0:
            raise ConfigError(f"--warmup-steps must not be negative. Received: {self.warmup_steps}.")
