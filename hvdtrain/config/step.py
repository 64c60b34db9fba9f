"""Options of the compiled step that the command line and `Trainer` share."""

import math
from dataclasses import KW_ONLY

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.precision import PrecisionName
from hvdtrain.config.section import section


@section
class StepConfig:
    """Options of the forward and backward pass."""

    _: KW_ONLY
    accumulate: int = 1
    """Microbatches per rank and optimizer step; gradients are exchanged once."""
    precision: PrecisionName | None = "float32"
    """Compute dtype of layers; if mixed, variables, the last layer and the loss stay float32."""
    sync_batch_norm: bool = False
    """Compute the statistics of BatchNormalization over all ranks."""
    jit: bool = False
    """Compile forward and backward pass with XLA. On CPU it made a CNN 0.7x as fast, a transformer 1.2x at best."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of keeping them: less memory."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigError(f"{opt('accumulate')} must be at least 1. Received: {self.accumulate}.")


@section
class ClippingConfig:
    """Bounds on the gradient of the global batch."""

    _: KW_ONLY
    clip_norm: float | None = None
    """Bound on the L2 norm of the whole gradient."""
    clip_value: float | None = None
    """Bound on the size of each of the gradient's elements."""

    def __post_init__(self) -> None:
        for option, bound in ((opt("clip_norm"), self.clip_norm), (opt("clip_value"), self.clip_value)):
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise ConfigError(f"{option} must be a positive number. Received: {bound}.")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                f"Clip by norm or by value, not both: leave out {opt('clip_norm')} or {opt('clip_value')}."
            )
