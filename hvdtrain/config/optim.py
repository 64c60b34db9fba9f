"""Options of the optimizer and its learning rate."""

import itertools
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.model import Scalar
from hvdtrain.config.options import applies_to, flag, needs, option, section
from hvdtrain.config.training import ClippingConfig

ScalingName = Literal["none", "linear", "sqrt"]
ScheduleName = Literal["constant", "cosine", "step", "polynomial"]


def _rise_within_run(shares: tuple[float, ...]) -> None:
    if not all(before < after for before, after in itertools.pairwise((0.0, *shares, 1.0))):
        raise ConfigError(
            f"{opt('decay_at')} must be shares of the run between 0 and 1, in rising order. Received: {shares}."
        )


@section
class OptimConfig(ClippingConfig):
    """The optimizer, its learning rate and weight decay."""

    optimizer: str = option("adam")
    """Name of a Keras optimizer in lower case, or lars."""
    optimizer_args: dict[str, Scalar] = flag({})
    """Further arguments of the optimizer, as NAME VALUE pairs."""
    learning_rate: float = option(1e-3, "(0, inf)")
    """Peak learning rate, before any scaling by the batch."""
    lr_scaling: ScalingName = option(
        "none",
        needs("base_batch", instead=f"add the batch that {opt('learning_rate')} was tuned for"),
    )
    """Multiply the learning rate by batch / base_batch (linear) or its square root (sqrt)."""
    base_batch: int | None = option(None, "[1, inf)", applies_to("lr_scaling=linear|sqrt"))
    """Global batch that the learning rate was tuned for."""
    schedule: ScheduleName = option(
        "constant", needs("decay_at", when="step", instead="add where the rate falls, such as 0.5")
    )
    """Shape of the learning rate after the warm-up."""
    warmup_steps: int = option(0, "[0, inf)")
    """Steps over which the learning rate rises linearly from zero to its peak."""
    final_rate: float = option(0.0, "[0, 1]", applies_to("schedule=cosine|polynomial"))
    """Final rate of cosine and polynomial, as a fraction of the peak."""
    decay_power: float = option(1.0, "(0, inf)", applies_to("schedule=polynomial"))
    """Exponent of the polynomial schedule; 1 is linear."""
    decay_at: tuple[float, ...] = option((), applies_to("schedule=step"), valid=_rise_within_run)
    """Points where the step schedule lowers the rate, as fractions of the run: 0.5 0.75."""
    decay_factor: float = option(0.1, "(0, 1)", applies_to("schedule=step"))
    """Factor of each reduction of the step schedule."""
    weight_decay: float | None = flag(None, "[0, inf)")
    """Weight decay, except on biases and normalization parameters; default: the optimizer's own."""
    ema: float = flag(0.0, "[0, 1)")
    """Momentum of an exponential moving average of the weights, used for evaluation and saving; 0: none."""
