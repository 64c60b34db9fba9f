"""Optimizers that move each element of a variable by its own gradient alone, so that slices can be updated apart."""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.optim.averaging import innermost

ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.RMSprop,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)


def check_updates_slices(optimizer: Any, option: str) -> None:
    """Refuse an optimizer that looks at whole variables, of which a rank has slices.

    Args:
        optimizer: possibly around another one.
        option: what makes the slices, as a user would type it.

    Raises:
        ConfigError: naming the optimizer, or its argument.
    """
    inner = innermost(optimizer)
    name = type(inner).__name__
    if type(inner) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ConfigError(
            f"{option} updates slices of variables, and {name} may look at whole ones: use one of {known}, or leave "
            f"out {option}."
        )
    for argument in ("clipnorm", "global_clipnorm"):
        if getattr(inner, argument) is not None:
            raise ConfigError(
                f"{name}({argument}=…) would see slices under {option}: use {opt('clip_norm')} in its place."
            )
