"""Options of the optimizer and its learning rate."""

import itertools
import math
from dataclasses import field
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.model import Scalar
from hvdtrain.config.section import section
from hvdtrain.config.training import ClippingConfig

ScalingName = Literal["none", "linear", "sqrt"]
ScheduleName = Literal["constant", "cosine", "step", "polynomial"]

SCHEDULES_OF = {
    "final_rate": ("cosine", "polynomial"),
    "decay_power": ("polynomial",),
    "decay_at": ("step",),
    "decay_factor": ("step",),
}
"""Schedules that use each option."""


@section
class OptimConfig(ClippingConfig):
    """The optimizer, its learning rate and weight decay."""

    optimizer: str = "adam"
    """Name of a Keras optimizer in lower case, or lars."""
    optimizer_args: dict[str, Scalar] = field(default_factory=dict)
    """Further arguments of the optimizer, as NAME VALUE pairs."""
    learning_rate: float = 1e-3
    """Peak learning rate, before any scaling by the batch."""
    lr_scaling: ScalingName = "none"
    """Multiply the learning rate by batch / base_batch (linear) or its square root (sqrt)."""
    base_batch: int | None = None
    """Global batch that the learning rate was tuned for."""
    schedule: ScheduleName = "constant"
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from zero to its peak."""
    final_rate: float = 0.0
    """Final rate of cosine and polynomial, as a fraction of the peak."""
    decay_power: float = 1.0
    """Exponent of the polynomial schedule; 1 is linear."""
    decay_at: tuple[float, ...] = ()
    """Points where the step schedule lowers the rate, as fractions of the run: 0.5 0.75."""
    decay_factor: float = 0.1
    """Factor of each reduction of the step schedule."""
    weight_decay: float | None = None
    """Weight decay, except on biases and normalization parameters; default: the optimizer's own."""
    ema: float = 0.0
    """Momentum of an exponential moving average of the weights, used for evaluation and saving; 0: none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(opt("learning_rate"), self.learning_rate)
        if self.warmup_steps < 0:
            raise ConfigError(f"{opt('warmup_steps')} must not be negative. Received: {self.warmup_steps}.")
        self._check_scaling()
        self._check_schedule()
        self._check_update()

    def _check_scaling(self) -> None:
        if self.base_batch is not None and self.base_batch < 1:
            raise ConfigError(f"{opt('base_batch')} must be at least 1. Received: {self.base_batch}.")
        if self.lr_scaling == "none" and self.base_batch is not None:
            raise ConfigError(f"{opt('base_batch')} has no effect with {opt('lr_scaling', 'none')}: leave it out.")
        if self.lr_scaling != "none" and self.base_batch is None:
            raise ConfigError(
                f"{opt('lr_scaling', self.lr_scaling)} needs the batch that "
                f"{opt('learning_rate', format(self.learning_rate, 'g'))} was "
                f"tuned for: add {opt('base_batch')}."
            )

    def _check_schedule(self) -> None:
        if not 0.0 <= self.final_rate <= 1.0:
            raise ConfigError(f"{opt('final_rate')} must lie in [0, 1]. Received: {self.final_rate}.")
        _check_positive(opt("decay_power"), self.decay_power)
        if not 0.0 < self.decay_factor < 1.0:
            raise ConfigError(f"{opt('decay_factor')} must lie in (0, 1). Received: {self.decay_factor}.")
        if not _rises_within_run(self.decay_at):
            raise ConfigError(
                f"{opt('decay_at')} must be shares of the run between 0 and 1, in rising order. Received: "
                f"{self.decay_at}."
            )
        for name, schedules in SCHEDULES_OF.items():
            if self.schedule not in schedules and getattr(self, name) != getattr(OptimConfig, name):
                raise ConfigError(
                    f"{opt(name)} has no effect with {opt('schedule', self.schedule)}: leave it out, or "
                    "use "
                    f"{' or '.join(opt('schedule', each) for each in schedules)}."
                )
        if self.schedule == "step" and not self.decay_at:
            raise ConfigError(
                f"{opt('schedule', 'step')} needs to know where the rate falls: add {opt('decay_at')}, such as 0.5."
            )

    def _check_update(self) -> None:
        if self.weight_decay is not None and not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise ConfigError(f"--weight-decay must be a number from 0. Received: {self.weight_decay}.")
        if not 0.0 <= self.ema < 1.0:
            raise ConfigError(f"--ema must lie in [0, 1). Received: {self.ema}.")


def _check_positive(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{option} must be a positive number. Received: {value}.")


def _rises_within_run(shares: tuple[float, ...]) -> bool:
    bounds = (0.0, *shares, 1.0)
    return all(before < after for before, after in itertools.pairwise(bounds))
