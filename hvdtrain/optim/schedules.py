"""Learning rates that move with the step."""

import math
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig


@keras.saving.register_keras_serializable(package="hvdtrain")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly from zero to `peak` over `warmup_steps`, then stays or falls as a half cosine to zero.

    Step t of n after the warm-up has peak x (1 + cos(pi t / n)) / 2 (Loshchilov and Hutter 2017, without restarts).
    """

    def __init__(self, peak: float, warmup_steps: int, total_steps: int, shape: str) -> None:
        self.peak = peak
        self.warmup_steps = warmup_steps
        self.total_steps = total_steps
        self.shape = shape

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the learning rate of `step` (from 0)."""
        step = tf.cast(step, tf.float32)
        rising = (step + 1.0) / float(max(1, self.warmup_steps))
        if self.shape == "cosine":
            span = float(max(1, self.total_steps - self.warmup_steps))
            done = tf.clip_by_value((step - self.warmup_steps) / span, 0.0, 1.0)
            after = 0.5 * (1.0 + tf.cos(math.pi * done))
        else:
            after = tf.ones_like(step)
        return self.peak * tf.where(step < self.warmup_steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {
            "peak": self.peak,
            "warmup_steps": self.warmup_steps,
            "total_steps": self.total_steps,
            "shape": self.shape,
        }


def learning_rate(config: OptimConfig, total_steps: int) -> Any:
    """Return a plain number where nothing moves, else a schedule over `total_steps` optimizer steps."""
    if config.warmup_steps >= total_steps:
        raise ConfigError(
            f"--warmup-steps {config.warmup_steps} leaves nothing of the run's {total_steps} steps at the full rate."
        )
    if config.schedule == "constant" and config.warmup_steps == 0:
        return config.learning_rate
    return WarmupSchedule(config.learning_rate, config.warmup_steps, total_steps, config.schedule)
