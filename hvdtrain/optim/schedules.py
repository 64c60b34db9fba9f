"""Learning-rate schedules."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.optim import OptimConfig


@keras.saving.register_keras_serializable(package="hvdtrain")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A linear warm-up to `peak` over `warmup_steps`, then a decay of the given `shape` until `total_steps`.

    With x = t / n at step t of the n after the warm-up, and f = `final_rate`, the rate as a fraction of the peak is

    constant: 1;
    cosine: f + (1 - f) (1 + cos(pi x)) / 2 (Loshchilov and Hutter 2017, arXiv:1608.03983, without restarts);
    polynomial: f + (1 - f) (1 - x)^`decay_power`;
    step: `decay_factor`^k past k of the fractions `decay_at` of the run.
    """

    def __init__(
        self,
        peak: float,
        warmup_steps: int,
        total_steps: int,
        shape: str,
        final_rate: float = 0.0,
        decay_power: float = 1.0,
        decay_at: Sequence[float] = (),
        decay_factor: float = 0.1,
    ) -> None:
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.shape = shape
        self.final_rate = final_rate
        self.decay_power = decay_power
        self.decay_at = tuple(decay_at)
        self.decay_factor = decay_factor

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the learning rate of `step` (from 0)."""
        step = tf.cast(step, tf.float32)
        rising = (step + 1.0) / float(max(1, self.warmup_steps))
        return self.peak * tf.where(step < self.warmup_steps, rising, self._after(step))

    def _after(self, step: tf.Tensor) -> tf.Tensor:
        """Return the fraction of the peak after the warm-up."""
        if self.shape == "step":
            passed = [tf.cast(step >= at, tf.float32) for at in decay_steps(self.decay_at, self.total_steps)]
            return tf.pow(self.decay_factor, tf.add_n(passed))
        if self.shape == "constant":
            return tf.ones_like(step)
        span = float(max(1, self.total_steps - self.warmup_steps))
        done = tf.clip_by_value((step - self.warmup_steps) / span, 0.0, 1.0)
        cosine = self.shape == "cosine"
        fall = 0.5 * (1.0 + tf.cos(math.pi * done)) if cosine else tf.pow(1.0 - done, self.decay_power)
        return self.final_rate + (1.0 - self.final_rate) * fall

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {
            "peak": self.peak,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
            "shape": self.shape,
            "final_rate": self.final_rate,
            "decay_power": self.decay_power,
            "decay_at": list(self.decay_at),
            "decay_factor": self.decay_factor,
        }


def decay_steps(shares: Sequence[float], total_steps: int) -> list[int]:
    """Convert fractions of a run to steps (from 0)."""
    return [round(share * total_steps) for share in shares]


def learning_rate(config: OptimConfig, total_steps: int, peak: float) -> Any:
    """Return a number if the rate is constant, else a schedule over `total_steps` optimizer steps.

    Raises:
        ConfigError: a warm-up as long as the run, or a decay before its end.
    """
    warmup = config.warmup_steps
    if warmup >= total_steps:
        raise ConfigError(
            f"{opt('warmup_steps', warmup)} leaves nothing of the run's {total_steps} steps at the full rate."
        )
    first = min(decay_steps(config.decay_at, total_steps), default=warmup)
    if first < warmup:
        raise ConfigError(
            f"{opt('decay_at', format(config.decay_at[0], 'g'))} is step {first} of {total_steps}, before the warm-up "
            "of "
            f"{opt('warmup_steps', warmup)} ends."
        )
    if config.schedule == "constant" and warmup == 0:
        return peak
    return WarmupSchedule(
        peak=peak,
        warmup_steps=warmup,
        total_steps=total_steps,
        shape=config.schedule,
        final_rate=config.final_rate,
        decay_power=config.decay_power,
        decay_at=config.decay_at,
        decay_factor=config.decay_factor,
    )
