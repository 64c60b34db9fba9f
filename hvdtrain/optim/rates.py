"""Learning rates for custom loops, with the options of the command line."""

from collections.abc import Sequence
from typing import Any, get_args

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig, ScalingName, ScheduleName
from hvdtrain.config.registry import suggestion
from hvdtrain.optim.scaling import scaled_learning_rate
from hvdtrain.optim.schedules import learning_rate as moving_rate


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
    """Return the learning rate for an optimizer: a Keras schedule, or a number if it is constant.

    Args:
        learning_rate: the peak, before any scaling by the batch.
        total_steps: optimizer steps of the whole run.
        schedule: `constant`, `cosine`, `step` or `polynomial`; see `hvdtrain.optim.schedules.WarmupSchedule`.
        warmup_steps: steps over which the rate rises linearly from zero to its peak.
        final_rate: final rate of cosine and polynomial, as a fraction of the peak.
        decay_power: exponent of the polynomial schedule.
        decay_at: where the step schedule lowers the rate, as fractions of the run, such as (0.5, 0.75).
        decay_factor: factor of each lowering.
        lr_scaling: `linear` multiplies the peak by batch / base_batch, `sqrt` by the root of that; see
            `hvdtrain.optim.scaling.scaled_learning_rate`.
        batch: samples per optimizer step over all ranks and microbatches.
        base_batch: the batch that `learning_rate` was tuned for.

    Raises:
        ConfigError: values that form no schedule, or have no effect; named as on the command line.
    """
    _check_name("schedule", schedule, get_args(ScheduleName))
    _check_name("lr_scaling", lr_scaling, get_args(ScalingName))
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
    return moving_rate(config, total_steps, peak)


def _check_name(what: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ConfigError(f"Unknown {what} {name!r}.{suggestion(name, dict.fromkeys(known, ''))}")
