"""Options of the update rule: what happens after the backward pass."""

from typing import Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section

ZeroStage = Literal[0, 1]


@section
class UpdateConfig:
    """How gradients become new weights; by default they are all-reduced, and every rank takes the same step."""

    zero: ZeroStage = 0
    """1: each rank keeps and updates a slice of the optimizer's slots; with more ranks less memory and less work."""
    local_steps: int | None = None
    """Each rank takes this many optimizer steps by itself before the weights are averaged; None: gradients travel."""
    average_slots: bool = False
    """With --local-steps: average the optimizer's slots along with the weights."""

    def __post_init__(self) -> None:
        if self.zero not in (0, 1):
            raise ConfigError(f"--zero must be 0 or 1. Received: {self.zero}.")
        if self.local_steps is not None and self.local_steps < 1:
            raise ConfigError(f"--local-steps must be at least 1. Received: {self.local_steps}.")
        if self.average_slots and self.local_steps is None:
            raise ConfigError("--average-slots has no effect without --local-steps: leave it out.")
        if self.zero and self.local_steps is not None:
            raise ConfigError("--zero needs every rank's gradients in each step: leave out --zero or --local-steps.")
