"""Scaling of the learning rate with the batch."""

import math

from hvdtrain.config.optim import OptimConfig
from hvdtrain.optim.schedules import decay_steps


def scaled_learning_rate(config: OptimConfig, batch: int) -> float:
    """Return the peak learning rate for `batch` samples per step over all ranks.

    linear: rate x batch / base_batch, which keeps the update per sample (Goyal et al. 2017, arXiv:1706.02677).
    sqrt: rate x sqrt(batch / base_batch), which keeps the variance of the update (Krizhevsky 2014,
    arXiv:1404.5997; used with LAMB by You et al. 2019, arXiv:1904.00962).
    """
    if config.base_batch is None:
        return float(config.learning_rate)
    ratio = batch / config.base_batch
    return config.learning_rate * (ratio if config.lr_scaling == "linear" else math.sqrt(ratio))


def describe_rate(config: OptimConfig, batch: int, total_steps: int) -> str:
    """Return the learning rate in words: peak, scaling, warm-up, schedule."""
    peak = scaled_learning_rate(config, batch)
    parts = [f"peak {peak:g}" + _origin(config, batch)]
    if config.warmup_steps:
        parts.append(f"warm-up {config.warmup_steps} steps")
    return ", ".join([*parts, _course(config, peak, total_steps)])


def _origin(config: OptimConfig, batch: int) -> str:
    if config.base_batch is None:
        return ""
    ratio = f"{batch}/{config.base_batch}"
    factor = ratio if config.lr_scaling == "linear" else f"sqrt({ratio})"
    return f" ({config.learning_rate:g} x {factor}, {config.lr_scaling})"


def _course(config: OptimConfig, peak: float, total_steps: int) -> str:
    if config.schedule == "step":
        steps = ", ".join(map(str, decay_steps(config.decay_at, total_steps)))
        return f"x {config.decay_factor:g} at step {steps} of {total_steps}"
    power = f" of power {config.decay_power:g}" if config.schedule == "polynomial" else ""
    end = f" to {peak * config.final_rate:g}" if config.final_rate else ""
    return f"{config.schedule}{power}{end}"
