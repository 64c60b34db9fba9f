"""Loading saved models for further training."""

import inspect
import os
import types
from collections.abc import Sequence
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Compression
from hvdtrain.horovod.distribution import distribution_of
from hvdtrain.horovod.flavour import IS_LEGACY, keras, optimizers
from hvdtrain.horovod.optimizer import keras_optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model whose optimizer, with its state, is wrapped in DistributedOptimizer.

    Args:
        filepath: a saved Keras model (`.keras`, `.h5`, with tf_keras also a SavedModel), or an open h5py.File.
        custom_optimizers: custom optimizer classes.
        custom_objects: further custom classes and functions, by name. A function may return a wrapped optimizer:
            `{"Mine": lambda **config: hvd.DistributedOptimizer(Mine(**config))}`.
        compression: see `DistributedOptimizer`.
        legacy_opts: whether the optimizer is one of `tf.keras.optimizers.legacy`, which Keras 3 does not have. With
            tf_keras the file records it.

    Raises:
        ConfigError: `legacy_opts=True` with Keras 3.
    """
    if legacy_opts and not IS_LEGACY:
        raise ConfigError(
            "Keras 3 has no tf.keras.optimizers.legacy. Leave legacy_opts out: a model that was saved with one of "
            "them is loaded with the optimizer of the same name."
        )
    path = filepath if isinstance(filepath, str | os.PathLike) else filepath.filename
    own = {kind.__name__: kind for kind in custom_optimizers or ()}
    given = {name: _as_class(name, made) for name, made in (custom_objects or {}).items()}
    model = keras.models.load_model(path, custom_objects={**own, **given})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distribution_of(optimizer) is None:
        loaded = optimizers.completed(optimizer, model.trainable_variables, path)
        model.optimizer = keras_optimizer(loaded, compression=compression)
    return model


def _as_class(name: str, made: Any) -> Any:
    """Return a class whose `from_config` calls `made`, if that is a function of a configuration; otherwise `made`.

    Keras 3 makes optimizers of classes only, and takes a function for the optimizer itself.
    """
    if IS_LEGACY or not isinstance(made, types.FunctionType) or not _takes_a_configuration(made):
        return made
    return type(name, (), {"from_config": classmethod(lambda kind, config: made(**config))})


def _takes_a_configuration(function: Any) -> bool:
    """Whether `function` takes any keywords, and nothing else: a loss or an activation takes tensors."""
    return [one.kind for one in inspect.signature(function).parameters.values()] == [inspect.Parameter.VAR_KEYWORD]
