"""Learning rates: schedules, scaling with the batch, and the command line's rates for custom loops."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.optim import OptimConfig, ScalingName, ScheduleName


@keras.saving.register_keras_serializable(package="hvdtrain")
class WarmupSchedule(keras.optimizers.schedules.LearningRateSchedule):
    """A linear warm-up to `peak` over `warmup_steps`, then decay until `total_steps`.

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
        return {**vars(self), "decay_at": list(self.decay_at)}


def decay_steps(shares: Sequence[float], total_steps: int) -> list[int]:
    """Convert fractions of a run to steps (from 0)."""
    return [round(share * total_steps) for share in shares]


def scheduled_rate(config: OptimConfig, total_steps: int, peak: float) -> Any:
    """Return a constant rate, or a schedule over `total_steps` steps.

    Raises ConfigError for a warm-up as long as the run, or a decay before its end.
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


def scaled_learning_rate(config: OptimConfig, batch: int) -> float:
    """Return the peak learning rate for a global batch of `batch`.

    linear: rate x batch / base_batch, which keeps the update per sample (Goyal et al. 2017, arXiv:1706.02677). sqrt:
    rate x sqrt(batch / base_batch), which keeps the variance of the update (Krizhevsky 2014, arXiv:1404.5997; used with
    LAMB by You et al. 2019, arXiv:1904.00962).
    """
    if config.base_batch is None:
        return float(config.learning_rate)
    ratio = batch / config.base_batch
    return config.learning_rate * (ratio if config.lr_scaling == "linear" else math.sqrt(ratio))


def describe_rate(config: OptimConfig, batch: int, total_steps: int) -> str:
    """Describe the learning rate: peak, scaling, warm-up, schedule."""
    peak = scaled_learning_rate(config, batch)
    parts = [f"peak {peak:g}"]
    if config.base_batch is not None:
        ratio = f"{batch}/{config.base_batch}"
        factor = ratio if config.lr_scaling == "linear" else f"sqrt({ratio})"
        parts[0] += f" ({config.learning_rate:g} x {factor}, {config.lr_scaling})"
    if config.warmup_steps:
        parts.append(f"warm-up {config.warmup_steps} steps")
    if config.schedule == "step":
        steps = ", ".join(map(str, decay_steps(config.decay_at, total_steps)))
        parts.append(f"x {config.decay_factor:g} at step {steps} of {total_steps}")
    else:
        power = f" of power {config.decay_power:g}" if config.schedule == "polynomial" else ""
        end = f" to {peak * config.final_rate:g}" if config.final_rate else ""
        parts.append(f"{config.schedule}{power}{end}")
    return ", ".join(parts)


def learning_rate_schedule(
    learning_rate: float,
    total_steps: int,
    *,
    schedule: ScheduleName = "constant",
    warmup_steps: int = 0,
    final_rate: float = 0.0,
    decay_power: float = 1.0,
    decay_at: Sequence[float] = (),
    decay_factor: float = 0.1,
    lr_scaling: ScalingName = "none",
    batch: int | None = None,
    base_batch: int | None = None,
) -> Any:
    """Return an optimizer's learning rate: a Keras schedule, or a number if constant.

    Args:
        learning_rate: the peak, before any scaling by the batch.
        total_steps: optimizer steps of the whole run.
        schedule: `constant`, `cosine`, `step` or `polynomial`; formulas are in `WarmupSchedule`.
        warmup_steps: steps over which the rate rises linearly from zero to its peak.
        final_rate: final rate of cosine and polynomial, as a fraction of the peak.
        decay_power: exponent of the polynomial schedule.
        decay_at: points where the step schedule lowers the rate, as fractions of the run, such as (0.5, 0.75).
        decay_factor: factor of each reduction.
        lr_scaling: `linear` multiplies the peak by batch / base_batch, `sqrt` by its square root.
        batch: samples per optimizer step over all ranks and microbatches.
        base_batch: the batch that `learning_rate` was tuned for.

    Raises:
        ConfigError: values that form no schedule, or have no effect; named as on the command line.

    Example::

        rate = hvdtrain.learning_rate_schedule(1e-3, total_steps=1000, schedule="cosine", warmup_steps=50)
        optimizer = keras.optimizers.AdamW(rate)
    """
    if (batch is None) != (lr_scaling == "none"):
        raise ConfigError(f"lr_scaling and batch go together. Received: lr_scaling={lr_scaling!r}, batch={batch}.")
    config = OptimConfig(
        learning_rate=learning_rate,
        lr_scaling=lr_scaling,
        base_batch=base_batch,
        schedule=schedule,
        warmup_steps=warmup_steps,
        final_rate=final_rate,
        decay_power=decay_power,
        decay_at=tuple(decay_at),
        decay_factor=decay_factor,
    )
    peak = config.learning_rate if batch is None else scaled_learning_rate(config, batch)
    return scheduled_rate(config, total_steps, peak)
