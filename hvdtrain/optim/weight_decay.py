"""Which variables decay: weights do, biases and the parameters of normalization layers don't."""

from collections.abc import Iterable
from typing import Any

EXEMPT_NAMES = ("bias", "gamma", "beta")
"""Keras' names of biases and normalization parameters; some of them have several dims."""


def decays(variable: Any) -> bool:
    """Tell whether `variable` (Keras' or TensorFlow's) is a weight: of two dims or more, and no bias by its name."""
    name = str(variable.name).split(":")[0].split("/")[-1]
    return len(variable.shape) >= 2 and name not in EXEMPT_NAMES


def exclude_from_decay(optimizer: Any, variables: Iterable[Any]) -> None:
    """Keep `optimizer`, which is not built yet, from decaying those of `variables` that are no weights."""
    optimizer.exclude_from_weight_decay(var_list=[variable for variable in variables if not decays(variable)])


def decaying_weights_only(optimizer: Any) -> Any:
    """Return `optimizer`, which will exclude all but weights from decay as soon as it is built.

    Keras asks for the exclusion before `build`, but the variables are first seen there; and whoever builds it can't
    know whether an optimizer was made here or by a user who decided about decay already.
    """
    build = optimizer.build

    def build_with_exclusion(variables: Any) -> None:
        exclude_from_decay(optimizer, variables)
        build(variables)

    optimizer.build = build_with_exclusion
    return optimizer
