"""Batch normalization with statistics over all replicas."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.backends.select import current_exchange
from hvdtrain.compat.keras import BatchNormalizationByMoments, flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.layers.exchanging import attributes_set
from hvdtrain.layers.moments import moments_of_all
from hvdtrain.runtime.compiled import numbered


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(BatchNormalizationByMoments):
    """Batch normalization over the global batch, equal to Keras' in one process.

    In training, mean and variance are over all replicas' samples (unmasked ones, with a mask), and gradients flow
    through them to every replica; each forward and backward pass sends one message. Replicas may have different numbers
    of samples. Gradients are those of the sum of the replicas' losses. In inference, and if `trainable` is False,
    nothing is sent and no session is needed. Inputs and outputs have the same shape; statistics have the shape of the
    normalized axis, in float32 for 16-bit inputs.

    Takes the arguments of `keras.layers.BatchNormalization`.

    Raises:
        ConfigError: `renorm=True` or Keras' own `synchronized=True`.
        LaunchError: called in training without `exchange` and before `hvdtrain.init()`.

    Example::

        outputs = hvdtrain.SyncBatchNormalization(momentum=0.9)(keras.Input((8, 8, 16)))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchange: Collectives | None = None
        """The replicas; None: the current session's."""
        self.has_samples: Any = 1.0
        """1, or 0 (a number or a scalar tensor) while this replica's samples are a placeholder."""
        if self.renorm:
            raise ConfigError(
                "SyncBatchNormalization does not renormalize: renorm corrects the small batches of single replicas, "
                "which normalizing over all replicas avoids. Received: renorm=True. Leave renorm out."
            )
        if self.synchronized:
            raise ConfigError(
                "Keras' synchronized=True exchanges over tf.distribute, where no Horovod rank takes part; "
                "SyncBatchNormalization already synchronizes. Received: synchronized=True. Leave it out."
            )

    def moments(self, inputs: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
        """Return global mean and variance, [size of axis], in `inputs`' dtype. Collective."""
        exchange = self.replicas()
        if exchange is None:
            return super().moments(inputs, mask, axes)
        # Keras adds this to the number of unmasked elements.
        extra = 0.0 if mask is None else keras.backend.epsilon()
        name = numbered("sync_batch_norm")
        return moments_of_all(
            inputs,
            axes=axes,
            mask=mask,
            exchange=exchange,
            name=name,
            has_samples=self.has_samples,
            extra=extra,
        )

    def replicas(self) -> Collectives | None:
        """Return the replicas' collectives; None if there is one replica."""
        exchange = current_exchange() if self.exchange is None else self.exchange
        return exchange if exchange.size > 1 else None


def sync_layers(model: Any) -> list[SyncBatchNormalization]:
    """Return the SyncBatchNormalization layers of `model`, nested ones too, in order."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, SyncBatchNormalization)]


def refuse_keras_synchronization(model: Any) -> None:
    """Raise ConfigError for `BatchNormalization(synchronized=True)`, of which Keras knows in tf.distribute alone."""
    for layer in flatten_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization) and layer.synchronized:
            raise ConfigError(
                f"Keras synchronizes {type(layer).__name__} {layer.name!r} (synchronized=True) over tf.distribute, in "
                "which no Horovod rank takes part. Leave it out, and write Trainer(…, sync_batch_norm=True)."
            )


def replicas_of(
    layers: Sequence[SyncBatchNormalization], exchange: Collectives, has_samples: Any
) -> AbstractContextManager[None]:
    """Set the collectives and `has_samples` of `layers` inside the returned context."""
    return attributes_set(layers, exchange=exchange, has_samples=has_samples)
