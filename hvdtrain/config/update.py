"""Options of the update rule: what happens after the backward pass."""

from typing import Literal, get_args

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

ZeroStage = Literal[0, 1, 2, 3]


@section
class UpdateConfig:
    """How gradients become new weights; by default they are all-reduced, and every rank takes the same step."""

    zero: ZeroStage = 0
    """Each rank keeps a slice: 1 of the optimizer's slots, 2 of the gradients too, 3 of the parameters too."""
    zero_prefetch: int = 0
    """With --zero 3: gather the parameters of this many layers ahead of the one that computes."""
    local_steps: int | None = None
    """Each rank takes this many optimizer steps by itself before the weights are averaged; None: gradients travel."""
    average_slots: bool = False
    """With --local-steps: average the optimizer's slots along with the weights."""

    def __post_init__(self) -> None:
        if self.zero not in get_args(ZeroStage):
            raise ConfigError(f"{opt('zero')} must be 0, 1, 2 or 3. Received: {self.zero}.")
        if self.zero_prefetch < 0:
            raise ConfigError(f"{opt('zero_prefetch')} must not be negative. Received: {self.zero_prefetch}.")
        if self.zero_prefetch and self.zero != 3:
            raise ConfigError(
                f"{opt('zero_prefetch')} has no effect without {opt('zero', 3)}: leave it out, or set it to 0."
            )
        if self.local_steps is not None and self.local_steps < 1:
            raise ConfigError(f"{opt('local_steps')} must be at least 1. Received: {self.local_steps}.")
        if self.average_slots and self.local_steps is None:
            raise ConfigError(f"{opt('average_slots')} has no effect without {opt('local_steps')}: leave it out.")
        if self.zero and self.local_steps is not None:
            raise ConfigError(
                f"{opt('zero')} needs every rank's gradients in each step: leave out {opt('zero')} or "
                f"{opt('local_steps')}."
            )
