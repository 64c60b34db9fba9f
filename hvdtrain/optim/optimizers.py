"""Optimizers by name, their weight decay, and which of them are elementwise."""

import inspect
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.registry import check_arguments, suggestion
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.lars import LARS
from hvdtrain.optim.schedules import scaled_learning_rate, scheduled_rate

EXEMPT_NAMES = ("bias", "gamma", "beta")
"""Keras' names of biases and normalization parameters; some have several dims."""


def decays(variable: Any) -> bool:
    """Return whether `variable` (Keras or TensorFlow) decays: two dims or more, and not exempt by name."""
    # A shard, as some update rules train, decays like the full variable.
    whole = getattr(variable, "whole", variable)
    name = str(whole.name).split(":")[0].split("/")[-1]
    return len(whole.shape) >= 2 and name not in EXEMPT_NAMES


def decaying_weights_only(optimizer: Any) -> Any:
    """Make `optimizer` decay weights only, not biases and normalization parameters; return it.

    Weights are variables of two dims or more not named `bias`, `gamma` or `beta`. The exclusion is set when the
    optimizer is built, replacing any earlier one. The command line does so for all optimizers.

    Args:
        optimizer: a Keras optimizer, possibly wrapped, as in a LossScaleOptimizer.

    Raises:
        ConfigError: it is already built.

    Example::

        optimizer = hvdtrain.decaying_weights_only(keras.optimizers.AdamW(1e-3, weight_decay=0.01))
    """
    inner = innermost(optimizer)
    if inner.built:
        raise ConfigError(f"The optimizer {inner.name!r} is built: say what decays before its first use.")
    build = inner.build

    # Keras wants the exclusion before `build`, but the variables are first known there.
    def build_with_exclusion(variables: Any) -> None:
        if not inner.built:
            inner.exclude_from_weight_decay(var_list=[variable for variable in variables if not decays(variable)])
        build(variables)

    inner.build = build_with_exclusion
    return optimizer


class NoOptimizer(keras.optimizers.SGD):
    """Stand-in for the optimizer of a model that only evaluates and predicts."""


ELEMENTWISE = (
    NoOptimizer,
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


def whole_update(optimizer: Any) -> str:
    """Return which optimizer, or argument of it, looks at whole variables, as for a norm; empty if none does."""
    name = type(optimizer).__name__
    if type(optimizer) not in ELEMENTWISE:
        return name
    clipping = (each for each in ("clipnorm", "global_clipnorm") if getattr(optimizer, each) is not None)
    return next((f"{name}({each}=…)" for each in clipping), "")


NOT_BY_NAME = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
"""The base class, and wrappers."""
REFUSED = {
    "schedulefreeadamw": "Keras computes it wrongly on TensorFlow: it takes the momentum after a step for the one "
    f"before it, and evaluates other weights than the averaged ones. {opt('optimizer', 'adamw')} with --ema comes near "
    "it"
}
"""Rejected Keras optimizers, with the reason."""
OWN_OPTIONS = {
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
    "adam_weight_decay": "weight_decay",
    "use_ema": "ema",
    "ema_momentum": "ema",
    "clipnorm": "clip_norm",
    "global_clipnorm": "clip_norm",
    "clipvalue": "clip_value",
}
"""Optimizer arguments with the equivalent option."""


def known_optimizers() -> dict[str, Any]:
    """Return the available optimizer classes by lower-case name."""
    classes = {
        name.lower(): cls
        for name, cls in vars(keras.optimizers).items()
        if inspect.isclass(cls) and issubclass(cls, keras.optimizers.Optimizer) and name not in NOT_BY_NAME
    }
    return {name: cls for name, cls in {**classes, "lars": LARS}.items() if name not in REFUSED}


def build_optimizer(config: OptimConfig, total_steps: int, batch: int) -> Any:
    """Build the optimizer of `config` for a global batch of `batch`.

    Its schedule spans `total_steps`. Weight decay excludes biases and normalization parameters. It is decoupled, as in
    Keras (Loshchilov and Hutter 2019, arXiv:1711.05101), w <- w - learning_rate x decay x w, for all but LARS; also for
    LAMB, whose paper (You et al. 2019, arXiv:1904.00962) has it in the trust ratio. Raises ConfigError for unknown
    optimizer or argument, or conflicting options.
    """
    cls = _class(config.optimizer)
    _refuse_twice(config)
    check_arguments("optimizer", config.optimizer, cls, config.optimizer_args)
    rate = scheduled_rate(config, total_steps, scaled_learning_rate(config, batch))
    try:
        optimizer = cls(learning_rate=rate, **_arguments(config, cls))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The optimizer {config.optimizer!r} cannot be built: {error}") from error
    return decaying_weights_only(optimizer)


def _class(name: str) -> Any:
    known = known_optimizers()
    if name in REFUSED:
        raise ConfigError(f"The optimizer {name!r} is not offered: {REFUSED[name]}.")
    if name not in known:
        raise ConfigError(f"Unknown optimizer {name!r}.{suggestion(name, dict.fromkeys(known, ''))}")
    return known[name]


def _refuse_twice(config: OptimConfig) -> None:
    """Reject arguments whose equivalent option is set, too."""
    if "learning_rate" in config.optimizer_args:
        raise ConfigError(f"The learning rate is an option of its own: use {opt('learning_rate')}.")
    for argument in config.optimizer_args:
        option = OWN_OPTIONS.get(argument)
        if option is not None and getattr(config, option) != getattr(OptimConfig, option):
            called = opt(option, argument=option not in ("ema", "weight_decay"))
            raise ConfigError(
                f"{called} and the argument {argument!r} of the optimizer {config.optimizer!r} "
                "do the same: leave out one of them."
            )


def _arguments(config: OptimConfig, cls: type) -> dict[str, Any]:
    arguments: dict[str, Any] = dict(config.optimizer_args)
    if config.weight_decay is not None:
        arguments["weight_decay"] = config.weight_decay
    if config.ema:
        arguments |= {"use_ema": True, "ema_momentum": config.ema}
    if cls is keras.optimizers.Muon:
        if config.weight_decay is not None:
            arguments["adam_weight_decay"] = config.weight_decay
        if arguments.get("exclude_layers") is not None:
            arguments["exclude_layers"] = [name.strip() for name in str(arguments["exclude_layers"]).split(",")]
    return arguments
