"""The tf_keras base class of the face's synchronized batch normalization."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.compat.tf_keras import BatchNormalizationByMoments
from hvdtrain.config.errors import ConfigError
from hvdtrain.layers.moments import moments_of_all
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import as_written

_OTHER_BATCHES = ("renorm", "virtual_batch_size", "synchronized")
"""Arguments that choose other samples to normalize over."""


class SyncBatchNormalization(BatchNormalizationByMoments):
    """Batch normalization over all replicas' samples; see the layer of the same name in `hvdtrain.layers`.

    Raises:
        ConfigError: an argument that chooses other samples to normalize over.
    """

    exchange: Collectives | None = None
    """Collectives among the replicas; None if there is one replica."""

    def __init__(self, **kwargs: Any) -> None:
        for name in _OTHER_BATCHES:
            if kwargs.get(name):
                raise ConfigError(
                    "SyncBatchNormalization normalizes over the samples of all ranks. "
                    f"Received: {name}={kwargs[name]!r}. Leave {name} out."
                )
        super().__init__(fused=False, **kwargs)

    @as_written
    def moments(
        self, inputs: tf.Tensor, axes: Sequence[int], keep_dims: bool, mask: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance over all replicas, in the dtype of `inputs`."""
        exchange = self.replicas()
        if exchange is None:
            return super().moments(inputs, axes, keep_dims, mask)
        name = numbered("sync_batch_norm")
        mean, variance = moments_of_all(inputs, axes=axes, mask=mask, exchange=exchange, name=name)
        if keep_dims:
            shape = [1 if dim in axes else size for dim, size in enumerate(inputs.shape)]
            mean, variance = tf.reshape(mean, shape), tf.reshape(variance, shape)
        return mean, variance

    def replicas(self) -> Collectives | None:
        """Return the collectives among the replicas; None if there is one replica."""
        return self.exchange
