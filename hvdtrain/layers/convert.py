"""Convert a model's BatchNormalization layers to synchronized ones, and back."""

from typing import Any

import keras

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.layers.sync_batch_norm import SyncBatchNormalization, sync_layers


def with_sync_batch_norm(model: Any) -> Any:
    """Return a copy of `model` with SyncBatchNormalization for each BatchNormalization.

    For Functional and Sequential models, nested ones too. Names, paths, values and order of all weights are kept;
    nothing is shared with `model`. A model that is already synchronized is returned unchanged. Raises ConfigError for
    no BatchNormalization, not built, or one that cannot be replaced: inside a subclassed model or layer, a wrapper, or
    with `renorm` or `synchronized`; or a layer that cannot be copied.
    """
    if not _holds(model, keras.layers.BatchNormalization) and sync_layers(model):
        return model
    if not _holds(model, keras.layers.BatchNormalization):
        raise ConfigError(
            "Synchronized batch normalization has no effect: the model has no BatchNormalization layer. "
            f"Received: {_described(model)}. Leave the option out."
        )
    if not model.built:
        raise ConfigError(
            "A model must be built before its BatchNormalization layers are replaced. Received: "
            f"{_described(model)}, not built. Give it a keras.Input, or call build() first."
        )
    return _copied(model, keras.layers.BatchNormalization, SyncBatchNormalization)


def without_sync_batch_norm(model: Any) -> Any:
    """Return a copy of `model` with plain BatchNormalization layers.

    The inverse of `with_sync_batch_norm`: the copy computes the same in inference, and loads without hvdtrain.
    """
    return _copied(model, SyncBatchNormalization, keras.layers.BatchNormalization)


def _copied(model: Any, old: Any, new: Any) -> Any:
    copy = _Replacement(old, new)(model)
    if [v.path for v in copy.weights] != [v.path for v in model.weights]:
        raise ConfigError(
            f"Replacing the BatchNormalization layers would change the names of the weights of {_described(model)}. "
            "Use hvdtrain.SyncBatchNormalization in the model's code instead."
        )
    # Not `variables`, which includes the states of random generators, numbered over all models.
    for mine, theirs in zip(copy.variables, model.variables, strict=True):
        mine.assign(theirs)
    return copy


def _refuse_another(layer: Any, copy: Any) -> None:
    """Reject a copy that lacks what the layer's configuration does not say (ConfigError)."""
    plain, known = (bool, int, float, str), vars(keras.layers.Layer())
    mine = {name: value for name, value in vars(layer).items() if isinstance(value, plain) and name not in known}
    wrong = [name for name, value in mine.items() if not name.startswith("_") and getattr(copy, name, None) != value]
    if wrong:
        raise ConfigError(
            f"A model cannot be copied without all settings of its layers. Received: {_described(layer)}, whose "
            f"get_config() leaves out {', '.join(wrong)}. Use "
            "hvdtrain.SyncBatchNormalization in the model's code instead."
        )


class _Replacement:
    """Copies each layer and model once, so that shared layers stay shared."""

    def __init__(self, old: Any, new: Any) -> None:
        self._old = old
        self._new = new
        self._done: dict[int, Any] = {}

    def __call__(self, layer: Any) -> Any:
        if id(layer) not in self._done:
            self._done[id(layer)] = self._copy(layer)
        return self._done[id(layer)]

    def _copy(self, layer: Any) -> Any:
        if isinstance(layer, keras.Model) and _is_of_keras(layer):
            return keras.models.clone_model(layer, clone_function=self)
        if type(layer) is self._old:
            return self._new(**layer.get_config())
        if _holds(layer, self._old):
            raise ConfigError(
                "A BatchNormalization layer can be replaced in Functional and Sequential models only. Received: "
                f"{_described(layer)}, which holds one inside. Use hvdtrain.SyncBatchNormalization in its code."
            )
        try:
            copy = type(layer).from_config(layer.get_config())
        except (NotImplementedError, TypeError) as error:
            raise ConfigError(
                f"A model cannot be copied without get_config() of all of its layers. Received: {_described(layer)}: "
                f"{error} Use hvdtrain.SyncBatchNormalization in the model's code instead."
            ) from error
        _refuse_another(layer, copy)
        return copy


def _holds(operation: Any, kind: type) -> bool:
    return any(type(layer) is kind for layer in flatten_layers(operation))


def _is_of_keras(layer: Any) -> bool:
    """Return whether the layer's class is Keras' own: a subclass may do more than its graph shows."""
    return type(layer).__module__.split(".")[0] == "keras"


def _described(layer: Any) -> str:
    return f"{type(layer).__name__} {layer.name!r}"
