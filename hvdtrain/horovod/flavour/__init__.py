"""The Keras of this process, i.e. `tf.keras`: Keras 3, or tf_keras with TF_USE_LEGACY_KERAS=1.

`keras` is its module; `optimizers` and `layers` hold what differs between the two, in a file for each. The other Keras
is never imported.
"""

from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError

IS_LEGACY: bool = tf.keras.Model.__module__.split(".")[0] == "tf_keras"

if IS_LEGACY:
    import tf_keras as keras

    from hvdtrain.horovod.flavour import legacy_layers as layers
    from hvdtrain.horovod.flavour import legacy_optimizers as optimizers
else:
    import keras

    from hvdtrain.horovod.flavour import keras3_optimizers as optimizers  # type: ignore[no-redef]
    from hvdtrain.layers import sync_batch_norm as layers  # type: ignore[no-redef]

__all__ = ["IS_LEGACY", "keras", "layers", "optimizers", "refuse_other_keras"]


def refuse_other_keras(thing: Any) -> None:
    """Refuse an optimizer, a layer or a model of the other Keras.

    Raises:
        ConfigError: it belongs to the other Keras.
    """
    kinds = type(thing).__mro__
    if any(kind.__module__.split(".")[0] == ("keras" if IS_LEGACY else "tf_keras") for kind in kinds):
        raise ConfigError(f"{type(thing).__module__}.{type(thing).__name__} is of {_MIXED[IS_LEGACY]}")


_MIXED = {
    True: "Keras 3, but TF_USE_LEGACY_KERAS is set: take it of tf.keras, or leave the variable out.",
    False: "tf_keras, but tf.keras is Keras 3: set TF_USE_LEGACY_KERAS=1 before Python starts.",
}
