"""Options of bad steps: loss or gradient that is NaN or infinite, and spikes of the loss."""

import math
from dataclasses import KW_ONLY
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

BadStepName = Literal["raise", "skip", "rollback"]
MAX_BAD_STEPS = 10


@section
class BadStepConfig:
    """What becomes of a step whose loss or gradient is NaN or infinite, or whose loss is a spike."""

    _: KW_ONLY
    on_bad_step: BadStepName = "raise"
    """How to handle a step with NaN, infinity or a spike: raise, skip its update on all ranks, or rollback to the
    newest good checkpoint, leaving out the batches since then."""
    spike_threshold: float | None = None
    """Treat a loss as bad that exceeds the median of the last 64 good steps by this many standard deviations, estimated
    from the median absolute deviation; None: no loss is a spike."""
    max_bad_steps: int = MAX_BAD_STEPS
    """End the training once more steps in a row are bad (skip), or more rollbacks are needed (rollback)."""

    def __post_init__(self) -> None:
        bound = self.spike_threshold
        if bound is not None and not (math.isfinite(bound) and bound > 0):
            raise ConfigError(f"{opt('spike_threshold')} must be a positive number. Received: {bound}.")
        if self.max_bad_steps < 1:
            raise ConfigError(f"{opt('max_bad_steps')} must be at least 1. Received: {self.max_bad_steps}.")
        if self.max_bad_steps != MAX_BAD_STEPS and self.on_bad_step == "raise":
            raise ConfigError(f"{opt('max_bad_steps')} has no effect with {opt('on_bad_step', 'raise')}: leave it out.")

    @property
    def guarded(self) -> bool:
        """Whether a step has to know before its update whether it is bad."""
        return self.on_bad_step != "raise" or self.spike_threshold is not None
