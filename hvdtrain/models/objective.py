"""Losses and metrics by name."""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import OutputKind
from hvdtrain.config.registry import suggestion
from hvdtrain.config.user_code import is_user_code, load_attribute

ABBREVIATIONS = ("mae", "mape", "mse", "msle")
"""Names that Keras accepts but does not list."""


def named_loss(name: str) -> Any:
    """Return the Keras loss `name`, or the user's MODULE:ATTRIBUTE. Raises ConfigError with suggestions."""
    return _named("--loss", kind="loss", name=name, get=keras.losses.get, known=known_losses)


def named_metrics(names: Sequence[str]) -> list[Any]:
    """Return new Keras metrics by name, or the user's MODULE:ATTRIBUTE. Raises ConfigError with suggestions."""
    # "accuracy" depends on targets and outputs: the trainer resolves it.
    plain = ("accuracy", "acc")
    return [
        name
        if name in plain
        else _named("--metrics", kind="metric", name=name, get=keras.metrics.get, known=known_metrics)
        for name in names
    ]


def known_losses() -> list[str]:
    """Return the lower-case names that `keras.losses.get` accepts."""
    return _names(keras.losses)


def known_metrics() -> list[str]:
    """Return the lower-case names of metrics that `keras.metrics.get` creates without arguments."""
    return _names(keras.metrics)


def on_logits(loss: Any) -> Any:
    """Return `loss` with from_logits=True, if it has that argument; else `loss`."""
    config = _config_of(loss)
    if config.get("from_logits") is not False:
        return loss
    if isinstance(loss, keras.losses.Loss):
        return type(loss).from_config({**config, "from_logits": True})
    return functools.partial(loss, from_logits=True)


def check_probabilities(model: keras.Model, loss: Any) -> None:
    """Reject a cross-entropy of probabilities after a linear layer (ConfigError)."""
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


def output_kind(model: keras.Model, loss: Any, classes: int | None) -> OutputKind:
    """Return a model's output kind, from its loss or last activation.

    Args:
        model: a built model.
        loss: its loss; a dict or list of several means `values`.
        classes: number of classes; None if the targets are not labels.
    """
    loss = _resolved(loss)
    kind = type(loss) if isinstance(loss, keras.losses.Loss) else _function(loss)
    name = _snake(getattr(kind, "__name__", ""))
    logits, activation = _from_logits(loss), _last_activation(model)
    if name.startswith("binary"):
        return "binary_logits" if logits else "binary_probabilities"
    if logits is None:
        logits = activation is keras.activations.linear
    if classes is None or isinstance(loss, dict | list | tuple) or _last_dim(model) not in (None, classes):
        return "values"
    if "crossentropy" in name or "kl_divergence" in name or activation is keras.activations.softmax:
        return "logits" if logits else "probabilities"
    if str(getattr(kind, "__module__", "")).startswith("keras."):
        return "values"
    return "logits" if logits else "probabilities"


def _from_logits(loss: Any) -> bool | None:
    """Return whether a loss takes logits; None if unknown."""
    stated = loss.keywords.get("from_logits") if isinstance(loss, functools.partial) else None
    stated = _config_of(_function(loss)).get("from_logits") if stated is None else stated
    return stated if isinstance(stated, bool) else None


def _function(loss: Any) -> Any:
    return loss.func if isinstance(loss, functools.partial) else loss


def _last_dim(model: keras.Model) -> int | None:
    """Return the last dim of the only output; None if unknown, 0 for several outputs."""
    try:
        shape = model.output_shape
    except (AttributeError, ValueError):  # a model of the user's own class
        return None
    return shape[-1] if isinstance(shape, tuple) and shape and not isinstance(shape[0], tuple) else 0


def _last_activation(model: keras.Model) -> Any:
    layers = getattr(model, "layers", [])
    return getattr(layers[-1], "activation", None) if layers else None


def _named(option: str, kind: str, name: str, get: Callable[[str], Any], known: Callable[[], list[str]]) -> Any:
    if is_user_code(name):
        thing = load_attribute(option, name)
        return thing() if isinstance(thing, type) else thing
    try:
        return get(name)
    except ValueError:
        raise ConfigError(f"{option}: Keras has no {kind} {name!r}.{nearest(name, known())}") from None
    except TypeError as error:
        raise ConfigError(
            f"{option}: Keras' {kind} {name!r} needs arguments ({error}): name an object of your own, MODULE:ATTRIBUTE."
        ) from error


def nearest(name: str, known: Sequence[str]) -> str:
    """Return " Perhaps you meant: X." for a near miss in any spelling, else the `known` names."""
    return suggestion(_snake(name), dict.fromkeys(known, ""))


def _names(module: Any) -> list[str]:
    bases = {"loss", "metric"}
    public = {_snake(name) for name in dir(module) if not name.startswith("_")} - bases
    return sorted(name for name in {*public, *ABBREVIATIONS} if _taken(module.get, name))


def _taken(get: Callable[[str], Any], name: str) -> bool:
    try:
        get(name)
    except (ValueError, TypeError):  # no such name, or it needs arguments
        return False
    return True


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def _resolved(loss: Any) -> Any:
    try:
        return keras.losses.get(loss) if isinstance(loss, str) else loss
    except ValueError:
        return loss  # the trainer refuses it


def _config_of(loss: Any) -> dict[str, Any]:
    """Return a loss object's configuration, or a Keras function's defaults."""
    if isinstance(loss, keras.losses.Loss):
        return dict(loss.get_config())
    if not callable(loss):
        return {}
    parameters = inspect.signature(loss).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


SOFT_LABEL_METRICS = {
    keras.metrics.SparseCategoricalAccuracy: keras.metrics.CategoricalAccuracy,
    keras.metrics.SparseTopKCategoricalAccuracy: keras.metrics.TopKCategoricalAccuracy,
    keras.metrics.SparseCategoricalCrossentropy: keras.metrics.CategoricalCrossentropy,
}
"""Soft-label counterparts of hard-label metrics."""


def has_soft_labels(config: DataConfig) -> bool:
    """Return whether targets are soft labels."""
    return "mixup" in config.augment


def soft_label_loss(config: DataConfig, loss: Any) -> Any:
    """Return the soft-label counterpart of `loss` if targets are soft labels; else `loss`.

    Raises ConfigError if there is no counterpart.
    """
    if not has_soft_labels(config):
        return loss
    loss = keras.losses.get(loss)
    if not isinstance(loss, keras.losses.SparseCategoricalCrossentropy):
        raise ConfigError(f"--augment mixup blends labels: it needs the cross-entropy of labels. Received: {loss}.")
    return keras.losses.CategoricalCrossentropy(from_logits=loss.get_config()["from_logits"])


def soft_label_metrics(config: DataConfig, metrics: Sequence[Any]) -> list[Any]:
    """Return the soft-label counterparts of `metrics` if targets are soft labels."""
    if not has_soft_labels(config):
        return list(metrics)
    return [
        SOFT_LABEL_METRICS[type(metric)].from_config(metric.get_config())
        if type(metric) in SOFT_LABEL_METRICS
        else metric
        for metric in metrics
    ]
