"""Weight decay for weights only, excluding biases and normalization parameters."""

from collections.abc import Iterable
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.optim.averaging import innermost

EXEMPT_NAMES = ("bias", "gamma", "beta")
"""Keras' names of biases and normalization parameters; some of them have several dims."""


def decays(variable: Any) -> bool:
    """Whether `variable` (Keras' or TensorFlow's) decays: two dims or more, and not exempt by its name."""
    # A slice of a variable, as an update rule may train, decays as the whole does.
    whole = getattr(variable, "whole", variable)
    name = str(whole.name).split(":")[0].split("/")[-1]
    return len(whole.shape) >= 2 and name not in EXEMPT_NAMES


def exclude_from_decay(optimizer: Any, variables: Iterable[Any]) -> None:
    """Exclude those of `variables` that do not decay from the weight decay of `optimizer`, which is not built yet."""
    optimizer.exclude_from_weight_decay(var_list=[variable for variable in variables if not decays(variable)])


def decaying_weights_only(optimizer: Any) -> Any:
    """Make `optimizer` decay weights only, not biases and normalization parameters, and return it.

    Weights are variables of two dims or more not named `bias`, `gamma` or `beta`. The exclusion is set when the
    optimizer is built, replacing any earlier one. The command line does so for all optimizers.

    Args:
        optimizer: a Keras optimizer, possibly wrapped, as in a LossScaleOptimizer.

    Raises:
        ConfigError: it is built already.
    """
    inner = innermost(optimizer)
    if inner.built:
        raise ConfigError(f"The optimizer {inner.name!r} is built: say what decays before its first use.")
    build = inner.build

    # Keras wants the exclusion before `build`, but the variables are first known there.
    def build_with_exclusion(variables: Any) -> None:
        if not inner.built:
            exclude_from_decay(inner, variables)
        build(variables)

    inner.build = build_with_exclusion
    return optimizer
