"""Wrapping of Keras optimizers: local gradients in, reduced gradients applied.

As in Horovod, a wrapped optimizer is an instance of a subclass of the original class, with its attributes, slots and
configuration: a model saved with it loads without Horovod.
"""

from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.distribution import Distribution, distribution_of
from hvdtrain.horovod.flavour import keras, optimizers, refuse_other_keras


def distributed(optimizer: Any, distribution: Distribution) -> Any:
    """Return an optimizer of the class, configuration and state of `optimizer` that reduces gradients first.

    Raises:
        ConfigError: not an optimizer of this process's Keras, or one that reduces already.
    """
    _check_optimizer(optimizer)
    kind = optimizer.__class__
    said = {"__module__": kind.__module__, "__doc__": kind.__doc__, **optimizers.names_of(kind)}
    wrapped: Any = type(kind.__name__, (optimizers.Distributed, kind), said)
    _register_alike(wrapped, kind)
    twin = optimizers.twin_of(optimizer, wrapped)
    twin.distribution = distribution
    optimizers.reduce_before_loss_scaling()
    return twin


def _register_alike(wrapped: Any, kind: Any) -> None:
    """Register `wrapped` so that Keras saves it under the name of `kind`, and loads `kind` by it."""
    package, registered, name = keras.saving.get_registered_name(kind).rpartition(">")
    if registered:
        for each in (wrapped, kind):  # the last one is what is loaded
            keras.saving.register_keras_serializable(package, name)(each)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ConfigError(
            "hvdtrain.horovod.keras wraps optimizers of Keras. Received: tf.compat.v1.train."
            f"{type(optimizer).__name__}. Wrap it with hvdtrain.horovod.DistributedOptimizer."
        )
    if not isinstance(optimizer, optimizers.KINDS):
        refuse_other_keras(optimizer)
        kind = type(optimizer)
        raise ConfigError(
            f"DistributedOptimizer wraps optimizers of Keras. Received: {kind.__module__}.{kind.__name__}."
        )
    if distribution_of(optimizer) is not None:
        raise ConfigError("This optimizer reduces gradients already: pass the one that was wrapped.")
