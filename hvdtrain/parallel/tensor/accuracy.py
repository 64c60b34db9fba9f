"""Keras' accuracies of logits that are sharded along the classes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import function_of_metric, replaced_function
from hvdtrain.parallel.tensor.cross_entropy import classes_of
from hvdtrain.parallel.tensor.outputs import Shard


def reads_shards(metric: Any) -> bool:
    """Whether a metric, or the one that it derives from, is an accuracy that needs no more than the largest logit."""
    return isinstance(metric, keras.metrics.MeanMetricWrapper) and function_of_metric(metric) in _forms()


@contextmanager
def on_shards(metric: Any, shard: Shard) -> Iterator[None]:
    """Let an accuracy for which `reads_shards` holds compare with slices of the logits inside this context."""
    form = _forms()[function_of_metric(metric)]
    with replaced_function(metric, lambda labels, logits: form(labels, logits, shard)):
        yield


def _forms() -> dict[Any, Callable[[Any, Any, Shard], Any]]:
    return {
        keras.metrics.sparse_categorical_accuracy: _sparse,
        keras.metrics.categorical_accuracy: _dense,
    }


def _sparse(labels: Any, logits: Any, shard: Shard) -> Any:
    labels = tf.convert_to_tensor(labels)
    if labels.shape.rank == logits.shape.rank and labels.shape[-1] == 1:
        labels = tf.squeeze(labels, -1)
    return tf.cast(tf.equal(tf.cast(labels, tf.int64), classes_of(logits, shard)), keras.backend.floatx())


def _dense(labels: Any, logits: Any, shard: Shard) -> Any:
    return tf.cast(tf.equal(tf.argmax(labels, -1), classes_of(logits, shard)), keras.backend.floatx())
