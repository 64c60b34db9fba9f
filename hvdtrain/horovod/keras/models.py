"""Loading saved models for further training."""

import os
from collections.abc import Sequence
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Compression
from hvdtrain.horovod.distribution import distribution_of
from hvdtrain.horovod.flavour import IS_LEGACY, keras
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
        custom_objects: further custom classes and functions, by name.
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
    model = keras.models.load_model(path, custom_objects={**own, **(custom_objects or {})})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distribution_of(optimizer) is None:
        model.optimizer = keras_optimizer(optimizer, compression=compression)
    return model
