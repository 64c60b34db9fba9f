"""Losses and metrics by name."""

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.user_code import is_user_code, load_attribute

ABBREVIATIONS = ("mae", "mape", "mse", "msle")
"""Names that Keras takes and does not list."""


def named_loss(name: str) -> Any:
    """Return the Keras loss, or the user's MODULE:ATTRIBUTE, of that name.

    Raises:
        ConfigError: there is none, with the nearest one there is.
    """
    return _named("--loss", "loss", name, keras.losses.get, keras.losses)


def named_metrics(names: Sequence[str]) -> list[Any]:
    """Return the Keras metrics, or the user's MODULE:ATTRIBUTE, of these names; new ones at each call.

    Raises:
        ConfigError: there is none of such a name, with the nearest one there is.
    """
    # What "accuracy" means depends on targets and outputs: the trainer decides it.
    plain = ("accuracy", "acc")
    return [
        name if name in plain else _named("--metrics", "metric", name, keras.metrics.get, keras.metrics)
        for name in names
    ]


def on_logits(loss: Any) -> Any:
    """Return `loss` for outputs that are logits, if it is one that can be told so."""
    config = _config_of(loss)
    if config.get("from_logits") is not False:
        return loss
    if isinstance(loss, keras.losses.Loss):
        return type(loss).from_config({**config, "from_logits": True})
    return functools.partial(loss, from_logits=True)


def check_probabilities(model: keras.Model, loss: Any) -> None:
    """Refuse a cross-entropy of probabilities where the model's one output comes from a layer without activation.

    Raises:
        ConfigError: it would be trained on logits as if they were probabilities.
    """
    loss = _resolved(loss)
    layer = getattr(model, "layers", [None])[-1:]
    linear = layer and getattr(layer[0], "activation", None) is keras.activations.linear
    if linear and _config_of(loss).get("from_logits") is False:
        name = getattr(loss, "name", None) or getattr(loss, "__name__", str(loss))
        raise ConfigError(
            f"The loss {name} expects probabilities, and the model's last layer {layer[0].name!r} has no activation: "
            'give it activation="softmax" (or "sigmoid"), or the loss from_logits=True: --loss MODULE:ATTRIBUTE takes '
            "a loss object of your own."
        )


def _named(option: str, kind: str, name: str, get: Callable[[str], Any], module: Any) -> Any:
    if is_user_code(name):
        thing = load_attribute(option, name)
        return thing() if isinstance(thing, type) else thing
    try:
        return get(name)
    except ValueError:
        raise ConfigError(f"{option}: Keras has no {kind} {name!r}.{_nearest(name, module)}") from None


def _nearest(name: str, module: Any) -> str:
    known = {public.lower(): public for public in [*dir(module), *ABBREVIATIONS] if not public.startswith("_")}
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.6)
    return f" Perhaps you meant: {known[near[0]]}." if near else f" See https://keras.io/api/{module.__name__[6:]}."


def _resolved(loss: Any) -> Any:
    try:
        return keras.losses.get(loss) if isinstance(loss, str) else loss
    except ValueError:
        return loss  # the trainer refuses it


def _config_of(loss: Any) -> dict[str, Any]:
    """Return what a loss object, or a function of Keras by its defaults, was made with."""
    if isinstance(loss, keras.losses.Loss):
        return dict(loss.get_config())
    if not callable(loss):
        return {}
    parameters = inspect.signature(loss).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
