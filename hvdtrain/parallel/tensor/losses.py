"""Cross-entropy and accuracies of logits sharded along the classes, without gathering them.

For the cross-entropy each rank sends three numbers per label: its largest logit, the sum of exponentials relative to
it, and the label's logit if it has that class (Shoeybi et al. 2019, section 3). The backward pass sends nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import function_of_loss, function_of_metric, replaced_function, set_mask
from hvdtrain.parallel.tensor.outputs import Shard
from hvdtrain.runtime.compiled import numbered

Losses = Callable[[Any, Any], Any]
"""(targets, logits) -> one loss per sample or token."""


def sharded_form(loss: Any, shard: Shard) -> Losses | None:
    """Return the equivalent of a Keras loss for sharded logits; None if there is none.

    Supports sparse_categorical_crossentropy and categorical_crossentropy of logits, as objects and functions.
    """
    function, config = function_of_loss(loss)
    if config.get("from_logits") is not True or config.get("axis", -1) != -1:
        return None
    if function is keras.losses.sparse_categorical_crossentropy:
        return lambda labels, logits: _sparse(labels, logits, shard, config.get("ignore_class"))
    if function is keras.losses.categorical_crossentropy:
        return lambda labels, logits: _dense(labels, logits, shard, float(config.get("label_smoothing") or 0.0))
    return None


def _sparse(labels: Any, logits: Any, shard: Shard, ignored: int | None) -> Any:
    labels = tf.cast(without_last_dim(labels, logits), tf.int64)
    counted = None if ignored is None else tf.not_equal(labels, ignored)
    known = labels if counted is None else tf.where(counted, labels, tf.zeros_like(labels))
    classes = logits.shape[-1]
    flat = _of_labels(tf.reshape(known, [-1]), tf.reshape(logits, [-1, classes]), shard)
    losses = tf.reshape(flat, tf.shape(labels))
    losses.set_shape(labels.shape)
    if counted is None:
        return losses
    losses = tf.where(counted, losses, tf.zeros_like(losses))
    set_mask(losses, counted)
    return losses


def without_last_dim(labels: Any, logits: Any) -> Any:
    """Drop a trailing dim of 1 from class labels of the logits' rank, as Keras does."""
    same_rank = labels.shape.rank == logits.shape.rank and labels.shape[-1] == 1
    return tf.squeeze(labels, -1) if same_rank else labels


def _of_labels(labels: tf.Tensor, logits: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Return -log softmax at labels [n], from logits [n, local classes]."""
    classes = shard.length
    valid = (labels >= 0) & (labels < classes)
    own = (labels >= shard.own.start) & (labels < shard.own.stop)
    # A label that no rank knows is looked up where nothing is: the error is that of one process.
    others = tf.where(valid, tf.zeros_like(labels), classes + tf.abs(labels))
    places = tf.where(own, labels - shard.own.start, others)

    @tf.custom_gradient
    def losses_of(values: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        found = tf.gather(values, places, batch_dims=1)
        at_label = tf.where(own, found, tf.zeros_like(found))
        log_sum, at_label = _combined(values, at_label, shard)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            slope = tf.exp(values - log_sum[:, tf.newaxis]) * upstream[:, tf.newaxis]
            rows = tf.stack([tf.range(tf.size(places, tf.int64)), places], axis=-1)
            mine = tf.where(own, upstream, tf.zeros_like(upstream))
            return _once(tf.tensor_scatter_nd_sub(slope, rows, mine))

        return log_sum - at_label, gradient

    return losses_of(logits)


def _dense(labels: Any, logits: Any, shard: Shard, smoothing: float) -> Any:
    """Return the cross-entropy with label distributions, from sharded logits."""
    classes = labels.shape[-1]
    wanted = tf.cast(labels, logits.dtype)
    if smoothing:
        wanted = wanted * (1.0 - smoothing) + smoothing / classes
    own = wanted[..., shard.own]
    weight = tf.reduce_sum(wanted, -1)

    @tf.custom_gradient
    def losses_of(values: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        log_sum, product = _combined(values, tf.reduce_sum(own * values, -1), shard)

        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            # Of a distribution, as TensorFlow takes the labels for one.
            return _once((tf.exp(values - log_sum[..., tf.newaxis]) - own) * upstream[..., tf.newaxis])

        return weight * log_sum - product, gradient

    return losses_of(logits)


def _combined(values: tf.Tensor, added: tf.Tensor, shard: Shard) -> tuple[tf.Tensor, tf.Tensor]:
    """Return log-sum-exp of `values` and sum of `added`, over all shards."""
    largest = tf.reduce_max(values, -1)
    total = tf.reduce_sum(tf.exp(values - largest[..., tf.newaxis]), -1)
    mine = tf.stack([largest, total, added])[tf.newaxis]
    everyone = shard.exchange.all_gather(mine, name=numbered("tensor/cross_entropy"))
    of_all = tf.reduce_max(everyone[:, 0], 0)
    log_sum = of_all + tf.math.log(tf.reduce_sum(everyone[:, 1] * tf.exp(everyone[:, 0] - of_all), 0))
    return log_sum, tf.reduce_sum(everyone[:, 2], 0)


def _once(slope: tf.Tensor) -> tf.Tensor:
    # The sums are constants to a tape around this one: a second derivative would be wrong.
    return tf.raw_ops.PreventGradient(input=slope, message="This cross-entropy has no second derivative.")


def classes_of(logits: Any, shard: Shard) -> tf.Tensor:
    """Return the argmax over all shards [..., local classes]; the first one on ties."""
    largest = tf.cast(tf.reduce_max(logits, -1), tf.float64)
    place = tf.argmax(logits, -1) + shard.own.start
    mine = tf.stack([largest, tf.cast(place, tf.float64)])[tf.newaxis]
    everyone = shard.exchange.all_gather(mine, name=numbered("tensor/largest"))
    chosen = tf.one_hot(tf.argmax(everyone[:, 0], 0), shard.exchange.size, axis=0, dtype=tf.float64)
    return tf.cast(tf.reduce_sum(everyone[:, 1] * chosen, 0), tf.int64)


def reads_shards(metric: Any) -> bool:
    """Return whether a metric is an accuracy of the largest logit."""
    return isinstance(metric, keras.metrics.MeanMetricWrapper) and function_of_metric(metric) in _forms()


@contextmanager
def on_shards(metric: Any, shard: Shard) -> Iterator[None]:
    """Make an accuracy (`reads_shards`) take sharded logits inside this context."""
    form = _forms()[function_of_metric(metric)]
    with replaced_function(metric, lambda labels, logits: form(labels, logits, shard)):
        yield


def _forms() -> dict[Any, Callable[[Any, Any, Shard], Any]]:
    return {
        keras.metrics.sparse_categorical_accuracy: _sparse_accuracy,
        keras.metrics.categorical_accuracy: _categorical_accuracy,
    }


def _sparse_accuracy(labels: Any, logits: Any, shard: Shard) -> Any:
    labels = without_last_dim(tf.convert_to_tensor(labels), logits)
    return tf.cast(tf.equal(tf.cast(labels, tf.int64), classes_of(logits, shard)), keras.backend.floatx())


def _categorical_accuracy(labels: Any, logits: Any, shard: Shard) -> Any:
    return tf.cast(tf.equal(tf.argmax(labels, -1), classes_of(logits, shard)), keras.backend.floatx())
