"""Losses that layers add: whether each is a mean over the samples, or a sum."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch
from hvdtrain.training.step.logs import metrics_of
from hvdtrain.training.step.loss_terms import Kind
from hvdtrain.training.step.patches import replaced_in_this_thread

TOLERANCE = 0.25
"""Deviation from 1 or 2, as where dropout draws other numbers."""


def kinds_of_added_losses(model: Any, batch: Batch, step: Callable[[Batch], Any]) -> tuple[Kind, ...]:
    """Return the kind of each loss that layers add in `step`, in order; none if no layer has such a call.

    Each is computed for a batch, and for twice the same samples: a mean stays, a sum doubles.

    Args:
        step: computes a batch as in training, without changing weights.

    Raises:
        ConfigError: a loss that is neither, and cannot be put together from those of slices.
    """
    if not any(_adds_losses(layer) for layer in flatten_layers(model)):
        return ()
    layers: list[Any] = []

    def add_loss(layer: Any, loss: Any) -> None:
        found.extend((layer, tf.reduce_sum(term)) for term in tf.nest.flatten(loss))

    def added(batch: Batch) -> list[tf.Tensor]:
        found.clear()
        with replaced_in_this_thread(keras.layers.Layer, "add_loss", add_loss):
            step(batch)
        layers[:] = [layer for layer, _ in found]
        return [value for _, value in found]

    found: list[tuple[Any, tf.Tensor]] = []
    compute = tf.function(added, autograph=False)
    compute.get_concrete_function(batch)
    if not layers:
        return ()
    samples = (batch.inputs, batch.targets, batch.sample_weight)
    inputs, targets, weights = tf.nest.map_structure(
        lambda each: None if each is None else tf.concat([each, each], 0), samples
    )
    with unchanged(model):
        once = compute(batch)
        twice = compute(batch._replace(inputs=inputs, targets=targets, sample_weight=weights))
    return tuple(
        _kind(layer, float(value), float(doubled)) for layer, value, doubled in zip(layers, once, twice, strict=True)
    )


def _adds_losses(layer: Any) -> bool:
    """Return whether a layer, not of Keras' own, may add losses in its call."""
    own = type(layer).__module__.split(".")[0] not in ("keras", "hvdtrain")
    return own and not isinstance(layer, keras.layers.InputLayer)


@contextmanager
def unchanged(model: Any) -> Iterator[None]:
    """Restore after the context what a call has changed: statistics, generators, metrics."""
    changing = [*model.non_trainable_variables, *(v for metric in metrics_of(model) for v in metric.variables)]
    before = [np.asarray(variable) for variable in changing]
    yield
    for variable, value in zip(changing, before, strict=True):
        variable.assign(value)


def _kind(layer: Any, once: float, twice: float) -> Kind:
    ratio = twice / once if once else 1.0
    if abs(ratio - 1.0) < TOLERANCE:
        return "mean"
    if abs(ratio - 2.0) < 2 * TOLERANCE:
        return "sum"
    raise ConfigError(
        f"{type(layer).__name__} {layer.name!r} adds a loss that is neither a mean nor a sum over the samples, "
        f"of which each rank has some. Received: {once:g} for a batch, {twice:g} for twice its samples. Add a mean, "
        "such as keras.ops.mean(keras.ops.square(x))."
    )
