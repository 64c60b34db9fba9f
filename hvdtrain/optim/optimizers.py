"""Keras optimizers by name."""

import inspect
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.registry import check_arguments, suggestion
from hvdtrain.optim.schedules import learning_rate

NOT_BY_NAME = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
"""The base class, and those that wrap other optimizers."""


def known_optimizers() -> dict[str, Any]:
    """Return every optimizer class of Keras by its name in lower case."""
    return {
        name.lower(): cls
        for name, cls in vars(keras.optimizers).items()
        if inspect.isclass(cls) and issubclass(cls, keras.optimizers.Optimizer) and name not in NOT_BY_NAME
    }


def build_optimizer(config: OptimConfig, total_steps: int) -> Any:
    """Build the Keras optimizer that `config` names; its schedule spans `total_steps`.

    Raises:
        ConfigError: unknown optimizer or argument.
    """
    known = known_optimizers()
    if config.optimizer not in known:
        names = dict.fromkeys(known, "")
        raise ConfigError(f"Unknown optimizer {config.optimizer!r}.{suggestion(config.optimizer, names)}")
    cls = known[config.optimizer]
    if "learning_rate" in config.optimizer_args:
        raise ConfigError("The learning rate is an option of its own: use --learning-rate.")
    check_arguments("optimizer", config.optimizer, cls, config.optimizer_args)
    try:
        return cls(learning_rate=learning_rate(config, total_steps), **config.optimizer_args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The optimizer {config.optimizer!r} cannot be built: {error}") from error
