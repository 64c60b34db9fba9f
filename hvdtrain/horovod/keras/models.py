"""Loading saved models for further training."""

import os
from collections.abc import Sequence
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Compression
from hvdtrain.horovod.optimizer import keras_optimizer
from hvdtrain.horovod.wrapped import distribution_of


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model whose optimizer, with its state, is wrapped in DistributedOptimizer.

    Args:
        filepath: a file that Keras saved (`.keras`, `.h5`), or an open h5py.File.
        custom_optimizers: classes of optimizers that are not Keras' own.
        custom_objects: further classes and functions, by name.
        compression: see `DistributedOptimizer`.
        legacy_opts: must be False: Keras 3 has no legacy optimizers.

    Raises:
        ConfigError: `legacy_opts=True`.
    """
    if legacy_opts:
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
