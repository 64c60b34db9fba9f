"""Exclude a replica without samples from a step.

A layer never sees an empty batch, so such a replica runs a neighbour's sample. Multiplying by zero would not exclude
it: 0 x inf is NaN, and one replica's NaN spreads to all sums.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
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
