"""Models and optimizers from what a user hands over: objects, names or builders."""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import suggestion
from hvdtrain.optim.optimizers import known_optimizers
from hvdtrain.training.options import StepOptions
from hvdtrain.training.precision import precision


def built_model(model: Any, options: StepOptions) -> Any:
    """Return `model` itself or what it builds, with the precision that the options name.

    Raises:
        ConfigError: no model, or one that was built with another precision already.
    """
    if options.precision is not None and not isinstance(model, keras.Model) and callable(model):
        with precision(options.precision):
            return _checked_kind(model(), keras.Model)
    built = _built(model, keras.Model)
    if options.precision is not None and built.dtype_policy.name != options.precision:
        raise ConfigError(
            f"The model was built with the dtype policy {built.dtype_policy.name}; precision={options.precision!r} "
            "needs a function that builds it, or keras.config.set_dtype_policy() before."
        )
    return built


def built_optimizer(optimizer: Any) -> Any:
    """Return `optimizer` itself, what its name stands for, or what it builds.

    Raises:
        ConfigError: no optimizer, or one that would exchange every microbatch.
    """
    if isinstance(optimizer, str):
        known = known_optimizers()
        if optimizer.lower() not in known:
            raise ConfigError(
                f"Unknown optimizer {optimizer!r}.{suggestion(optimizer.lower(), dict.fromkeys(known, ''))}"
            )
        optimizer = known[optimizer.lower()]
    built = _built(optimizer, keras.optimizers.Optimizer)
    if getattr(built, "inner_optimizer", built).gradient_accumulation_steps:
        raise ConfigError(
            "Keras' gradient_accumulation_steps would exchange the gradients of every microbatch: use "
            "Trainer(..., accumulate=K) or --accumulate K, which exchange once for K microbatches."
        )
    return built


def _built(thing: Any, kind: type) -> Any:
    if not isinstance(thing, kind) and callable(thing):
        thing = thing()
    return _checked_kind(thing, kind)


def _checked_kind(thing: Any, kind: type) -> Any:
    if not isinstance(thing, kind):
        raise ConfigError(f"A Keras {kind.__name__} or a function that builds one is needed. Received: {thing!r}.")
    return thing
