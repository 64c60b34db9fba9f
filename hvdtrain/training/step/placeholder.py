"""Exclude a replica without samples from a step.

A layer never sees an empty batch, so such a replica runs a neighbour's sample. Multiplying by zero would not exclude
it: 0 x inf is NaN, and one replica's NaN spreads to all sums.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.data.batch import Batch
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.state.structure import statistics_of


def counted(tensor: Gradient, has_samples: tf.Tensor | float) -> Gradient:
    """Return `tensor` (or None, or tf.IndexedSlices), or zeros without samples."""
    if tensor is None or _always(has_samples):
        return tensor
    if isinstance(tensor, tf.IndexedSlices):
        return tf.IndexedSlices(counted(tensor.values, has_samples), tensor.indices, tensor.dense_shape)
    return tf.where(_any(has_samples), tensor, tf.zeros_like(tensor))


@contextmanager
def restored_if_empty(
    variables: Collection[tf.Variable], has_samples: tf.Tensor | float, *, shared: bool = False
) -> Iterator[None]:
    """Restore `variables`, updated inside the context, on a replica without samples.

    `shared` says whether the replicas of a tf.distribute strategy share them.
    """
    if _always(has_samples) or (shared and tf.distribute.has_strategy()):
        yield
        return
    before = [variable.read_value() for variable in variables]
    yield
    for variable, value in zip(variables, before, strict=True):
        variable.assign(tf.where(_any(has_samples), variable.read_value(), value))


@contextmanager
def kept_statistics(
    statistics: Collection[tf.Variable],
    batch: Batch,
    *,
    synchronized: Collection[Any] = (),
    shared: bool = False,
) -> Iterator[None]:
    """Restore `statistics` on a replica without samples, and those of `synchronized` layers if no replica has any.

    A batch whose samples a filter has all taken has no mean: in Keras BatchNormalization's averages become NaN, and
    stay so.
    """
    total = batch.global_samples
    anywhere = tf.cast(total > 0, tf.float32) if tf.is_tensor(total) else 1.0
    here = batch.has_samples
    if tf.is_tensor(anywhere):
        here = tf.cast(here, tf.float32) * anywhere
    of_all = [variable for layer in synchronized for variable in statistics_of(layer)]
    with restored_if_empty(statistics, here, shared=shared), restored_if_empty(of_all, anywhere, shared=shared):
        yield


def updated_statistics(model: Any, *, but: Collection[Any] = ()) -> list[tf.Variable]:
    """Return statistics that a training forward pass updates (BatchNorm's averages …).

    Excludes integers, such as call counters: they are not averaged, and stay equal because every replica counts.
    """
    layers = [layer for layer in flatten_layers(model) if layer not in but]
    return [variable for layer in layers for variable in statistics_of(layer)]


def _always(has_samples: tf.Tensor | float) -> bool:
    return not tf.is_tensor(has_samples) and bool(has_samples)


def _any(has_samples: tf.Tensor | float) -> tf.Tensor:
    return tf.cast(has_samples, tf.float32) > 0
