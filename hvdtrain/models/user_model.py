"""A user's own model, built by MODULE:FUNCTION."""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.user_code import arguments_for, load_function
from hvdtrain.models.family import ModelFamily

OPTION = "--model"


def user_family(config: ModelConfig) -> ModelFamily:
    """Wrap the user's function `config.model` as a model family.

    The function is called with `config.model_args`, and with `sample_shape`, `classes` and `seed` if it has such
    parameters. Python's, NumPy's and Keras' generators are seeded, so that Keras layers start identically on every rank
    and in every run. Its attributes `loss` and `metrics`, if any, are defaults as for `keras.Model.compile`;
    `config.loss` and `config.metrics` override them. Its attribute `rules`, if any, holds layout rules as for
    `hvdtrain.parallelize`.

    Raises:
        ConfigError: no such function, or no loss.
    """
    function = load_function(OPTION, config.model)
    if isinstance(function, keras.Model):
        raise ConfigError(f"{OPTION} {config.model} is a model: name a function that returns it. Received: {function}.")
    said = getattr(function, "__dict__", {})
    if said.get("loss") is None and config.loss is None:
        last = config.model.rpartition(":")[2]
        raise ConfigError(
            f"{OPTION} {config.model} says nothing of its loss: give --loss NAME, such as --loss "
            f'sparse_categorical_crossentropy, or write {last}.loss = "NAME" below the function.'
        )

    def build(shape: Any, classes: int | None, seed: int, /, **arguments: Any) -> keras.Model:
        offered = {"sample_shape": shape, "classes": classes, "seed": seed}
        values = arguments_for(OPTION, name=config.model, function=function, offered=offered, given=arguments)
        keras.utils.set_random_seed(seed)
        return _checked(config.model, function(**values))

    rules = said.get("rules")
    return ModelFamily(
        build,
        loss=lambda: said.get("loss"),
        metrics=lambda: said.get("metrics") or [],
        rules=None if rules is None else lambda classes, ranks, **arguments: rules,
    )


def _checked(name: str, model: Any) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ConfigError(
            f"{OPTION} {name} must return a keras.Model. Received: {model!r}, of type "
            f"{type(model).__module__}.{type(model).__qualname__}."
        )
    if model.compiled:
        raise ConfigError(
            f"{OPTION} {name} returns a compiled model, and what it was compiled with would have no effect: leave out "
            "compile(), and give --loss, --metrics and --optimizer."
        )
    return model
