"""Which variables decay: weights do, biases and the parameters of normalization layers don't."""

from collections.abc import Iterable
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.optim.averaging import innermost

EXEMPT_NAMES = ("bias", "gamma", "beta")
"""Keras' names of biases and normalization parameters; some of them have several dims."""


def decays(variable: Any) -> bool:
    """Tell whether `variable` (Keras' or TensorFlow's) is a weight: of two dims or more, and no bias by its name."""
    # A slice of a variable, as an update rule may train, decays as the whole does.
    whole = getattr(variable, "whole", variable)
    name = str(whole.name).split(":")[0].split("/")[-1]
    return len(whole.shape) >= 2 and name not in EXEMPT_NAMES


def exclude_from_decay(optimizer: Any, variables: Iterable[Any]) -> None:
    """Keep `optimizer`, which is not built yet, from decaying those of `variables` that are no weights."""
    optimizer.exclude_from_weight_decay(var_list=[variable for variable in variables if not decays(variable)])


def decaying_weights_only(optimizer: Any) -> Any:
    """Return `optimizer` itself, which from now on decays weights, but no biases and normalization parameters.

    Weights are variables of two dims or more that are not named `bias`, `gamma` or `beta`; what is excluded is settled
    when the optimizer is built, in place of what was excluded before. The command line does it to all optimizers.

    Args:
        optimizer: a Keras optimizer, possibly within others such as a LossScaleOptimizer.

    Raises:
        ConfigError: it is built already.
    """
    inner = innermost(optimizer)
    if inner.built:
        raise ConfigError(f"The optimizer {inner.name!r} is built: say what decays before its first use.")
    build = inner.build

    # Keras asks for the exclusion before `build`, but the variables are first seen there.
    def build_with_exclusion(variables: Any) -> None:
        if not inner.built:
            exclude_from_decay(inner, variables)
        build(variables)

    inner.build = build_with_exclusion
    return optimizer
