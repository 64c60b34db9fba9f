"""Batch normalization with the statistics of all replicas' samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.compiled import numbered
from hvdtrain.backends.protocol import Exchange
from hvdtrain.backends.select import current_exchange
from hvdtrain.config.errors import ConfigError


@keras.saving.register_keras_serializable(package="hvdtrain")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Batch normalization over the global batch: what `keras.layers.BatchNormalization` computes in one process.

    In training, mean and variance are those of all replicas' samples (with a mask: of all that it lets through), and
    gradients flow through them to every replica; each forward and each backward pass exchanges one message. Replicas
    may hold different numbers of samples. The gradients are those of the sum of the replicas' losses. In inference,
    and where `trainable` is False, nothing is exchanged and no session is needed. Inputs and outputs have the same
    shape; statistics have the shape of the normalized axis, in float32 for 16-bit inputs.

    The arguments are those of `keras.layers.BatchNormalization`.

    Raises:
        ConfigError: `renorm=True` or Keras' own `synchronized=True`.
        LaunchError: called in training without `exchange` and before `hvdtrain.init()`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchange: Exchange | None = None
        """The replicas; the current session's ranks if None."""
        self.present: Any = 1.0
        """1, or 0 (a number or a scalar tensor) while this replica's samples are a placeholder that must not count."""
        if self.renorm:
            raise ConfigError(
                "SyncBatchNormalization does not renormalize: renorm corrects the small batches of single replicas, "
                "which normalizing over all replicas avoids. Received: renorm=True. Leave renorm out."
            )
        if self.synchronized:
            raise ConfigError(
                "Keras' synchronized=True exchanges over tf.distribute, where no Horovod rank takes part; "
                "SyncBatchNormalization is synchronized by itself. Received: synchronized=True. Leave it out."
            )

    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        """Return mean and variance over all replicas, shape [size of axis], in the dtype of `inputs`."""
        exchange = self.replicas()
        if exchange is None:
            return super()._moments(inputs, mask)
        # Keras adds this to the number of unmasked elements.
        extra = 0.0 if mask is None else keras.backend.epsilon()
        local = tf.math.multiply_no_nan(self._local_sums(inputs, mask), tf.cast(self.present, tf.float64))
        total = sum_over_replicas(local, exchange, numbered(f"sync_batch_norm/{self.path}"))
        mean, variance = _mean_and_variance(total, channels=inputs.shape[self.axis], extra=extra)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)

    def replicas(self) -> Exchange | None:
        """Return the exchange with the other replicas, None where there are none."""
        exchange = current_exchange() if self.exchange is None else self.exchange
        return exchange if exchange.size > 1 else None

    def _local_sums(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
        """Return [count, sums, sums of squares] of this replica in float64.

        The squares are added up around the local mean, where nothing cancels, and are moved to zero in float64.
        """
        axes, rank = self._reduction_axes, inputs.shape.rank
        if mask is None:
            count = tf.cast(tf.size(inputs, tf.int64) // inputs.shape[self.axis], tf.float64)[tf.newaxis]
        else:
            kept = tf.broadcast_to(tf.cast(mask, tf.bool)[..., tf.newaxis], tf.shape(inputs))
            count = tf.reduce_sum(tf.cast(kept, tf.float64), axes)
            inputs = tf.where(kept, inputs, tf.zeros_like(inputs))
        mean = tf.math.divide_no_nan(tf.reduce_sum(inputs, axes), tf.cast(count, inputs.dtype))
        # The derivative by the mean is the sum of the deviations: zero.
        center = tf.reshape(tf.stop_gradient(mean), [-1 if dim == self.axis % rank else 1 for dim in range(rank)])
        squares = tf.math.squared_difference(inputs, center)
        if mask is not None:
            squares = tf.where(kept, squares, tf.zeros_like(squares))
        mean, around_mean = tf.cast(mean, tf.float64), tf.cast(tf.reduce_sum(squares, axes), tf.float64)
        return tf.concat([count, count * mean, around_mean + count * mean**2], axis=0)


def _mean_and_variance(total: tf.Tensor, *, channels: int, extra: float) -> tuple[tf.Tensor, tf.Tensor]:
    """Return mean and variance, shape [channels], from the sums over all replicas.

    With n = count, S = sum, Q = sum of squares: mean m = S / (n + extra), variance (Q - 2 m S + n m^2) / (n + extra).
    For n_r samples of mean m_r and squared deviations M_r on replica r, Q = sum(M_r + n_r m_r^2), so that this is the
    combination of partial variances of Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979), for any number of parts and in one message. What cancels in it does so in
    float64: a share of about 1e-16 (mean^2 / variance).
    """
    count, sums, squares = tf.split(total, [total.shape[0] - 2 * channels, channels, channels])
    mean = tf.math.divide_no_nan(sums, count + extra)
    variance = tf.math.divide_no_nan(squares - 2.0 * mean * sums + count * mean**2, count + extra)
    return mean, tf.maximum(variance, tf.zeros_like(variance))


def sum_over_replicas(tensor: tf.Tensor, exchange: Exchange, name: str) -> tf.Tensor:
    """Return the elementwise sum over the replicas, differentiable.

    Each replica's loss depends on every replica's `tensor`, so the gradient by it is the sum of their upstream
    gradients: the same exchange backwards. The messages are called `name`/forward and `name`/backward.
    """

    @tf.custom_gradient
    def summed(local: tf.Tensor) -> tuple[tf.Tensor, Any]:
        total = exchange.all_reduce(local, name=f"{name}/forward")
        return total, lambda upstream: exchange.all_reduce(upstream, name=f"{name}/backward")

    return summed(tensor)


def sync_layers(model: Any) -> list[SyncBatchNormalization]:
    """Return the SyncBatchNormalization layers of `model`, nested ones too, in the order in which it holds them."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, SyncBatchNormalization)]


@contextmanager
def replicas_of(layers: Sequence[SyncBatchNormalization], exchange: Exchange, present: Any) -> Iterator[None]:
    """Let `layers` exchange over `exchange`, and count this replica's samples `present` times (1 or 0), for a while.

    What they had before comes back at the end: a symbolic `present` is of no use outside the function it belongs to.
    """
    before = [(layer, layer.exchange, layer.present) for layer in layers]
    try:
        for layer in layers:
            layer.exchange, layer.present = exchange, present
        yield
    finally:
        for layer, *values in before:
            layer.exchange, layer.present = values
