"""Which models compute with the samples in code that is not Keras' or KerasHub's own."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras import (
    calls_of,
    compile_arguments,
    flatten_layers,
    function_of_loss,
    operations_of,
)
from hvdtrain.partition.kinds import Rows
from hvdtrain.partition.partition import Partition
from hvdtrain.partition.tracing import traced
from hvdtrain.training.step.batches import reads_outputs
from hvdtrain.training.step.logs import metrics_of
from hvdtrain.training.step.own_metrics import is_foreign, is_own_metric


def has_own_code(model: Any) -> bool:
    """Return whether code that is not Keras' forms numbers of the samples: a step, a loss, a metric or a layer."""
    return reads_outputs(model) or bool(own_parts(model))


def own_parts(model: Any) -> list[str]:
    """Return names of losses, metrics, layers and operations of a model that are not Keras' own, for messages."""
    settings = compile_arguments(model) if model.compiled else {}
    losses = _leaves(settings.get("loss"))
    metrics = [*_leaves(settings.get("metrics")), *_leaves(settings.get("weighted_metrics")), *metrics_of(model)]
    found = [
        *(f"layer {_named(each)}" for each in flatten_layers(model) if _is_own_layer(each)),
        *(f"operation {_named(each)}" for each in _mixing_operations(model)),
        *(f"loss {_named(each)}" for each in losses if not takes_samples_alone(each)),
        *(f"metric {_named(each)}" for each in metrics if is_own_metric(each)),
    ]
    return list(dict.fromkeys(found))


def may_add_losses(model: Any) -> bool:
    """Return whether layers of a model may add losses of their outputs to those of `compile`."""
    return any(
        _is_own_layer(layer)
        or isinstance(layer, keras.layers.ActivityRegularization)
        or getattr(layer, "activity_regularizer", None) is not None
        for layer in flatten_layers(model)
    )


def _named(thing: Any) -> str:
    name = getattr(thing, "name", None)
    return getattr(thing, "__name__", None) or (
        f"{type(thing).__name__} {name!r}" if isinstance(name, str) else type(thing).__name__
    )


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [leaf for each in nest.values() for leaf in _leaves(each)]
    if isinstance(nest, list | tuple):
        return [leaf for each in nest for leaf in _leaves(each)]
    return [] if nest is None or isinstance(nest, str) else [nest]


def _is_own_layer(layer: Any) -> bool:
    if is_foreign(layer) or isinstance(layer, keras.layers.Lambda):
        return True
    functions = (getattr(layer, name, None) for name in ("activation", "recurrent_activation", "activity_regularizer"))
    return any(each is not None and is_foreign(each) for each in functions)


def _mixing_operations(model: Any) -> list[Any]:
    """Return the operations of keras.ops in a model's graph that compute with several samples, as their trace shows."""
    operations = [each for each in operations_of(model) if not isinstance(each, keras.layers.Layer)]
    found: list[Any] = []

    def look() -> None:
        found.clear()
        for operation in operations:
            try:
                apart = all(_keeps_samples_apart(operation, *arguments) for arguments in calls_of(operation))
            except Exception:  # whatever it is: it cannot be told
                apart = False
            if not apart:
                found.append(operation)

    if operations:
        tf.function(look, autograph=False).get_concrete_function()
    return found


def _keeps_samples_apart(operation: Any, args: Any, options: Any) -> bool:
    """Return whether each row of an operation's outputs is that of one sample, while a function is traced."""
    count = tf.raw_ops.Placeholder(dtype=tf.int32, shape=[])
    first = tf.raw_ops.Placeholder(dtype=tf.float32, shape=[])
    partition = Partition(NoOpCollectives(), rows=count, begin=count, total=count, first=first)

    def opened(symbol: Any) -> Any:
        if not isinstance(symbol, keras.KerasTensor):
            return symbol
        if symbol.shape[:1] not in ((), (1,), (None,)):
            raise ValueError("as many samples as the model names, or anything else")
        tensor = tf.raw_ops.Placeholder(dtype=symbol.dtype, shape=symbol.shape)
        return partition.mark(tensor, Rows()) if symbol.shape[:1] == (None,) else tensor

    args, options = tf.nest.map_structure(opened, (args, options))
    with traced(partition):
        outputs = tf.nest.flatten(operation(*args, **options))
    kinds = [kind for each in outputs if (kind := partition.kind(each)) is not None]
    return not partition.fetches and all(
        isinstance(kind, Rows) and kind.dim == 0 and kind.per == (1,) for kind in kinds
    )


def takes_samples_alone(loss: Any) -> bool:
    """Return whether a loss of Keras' own gives each sample a value that no other sample has part in."""
    function, arguments = function_of_loss(loss)
    if not getattr(function, "__module__", "").startswith("keras.") or function is keras.losses.circle:
        return False
    axes = np.atleast_1d(arguments.get("axis", -1))
    return all(axis is not None and axis != 0 for axis in axes)
