"""Which models compute with the samples in code that is not Keras' or KerasHub's own."""

from typing import Any

import keras
import numpy as np

from hvdtrain.compat.keras import (
    compile_arguments,
    flatten_layers,
    function_of_loss,
    function_of_metric,
    operations_of,
)
from hvdtrain.training.step.batches import reads_outputs
from hvdtrain.training.step.logs import metrics_of


def has_own_code(model: Any) -> bool:
    """Return whether code that is not Keras' forms numbers of the samples: a step, a loss, a metric or a layer."""
    if reads_outputs(model):
        return True
    settings = compile_arguments(model) if model.compiled else {}
    losses = _leaves(settings.get("loss"))
    metrics = [*_leaves(settings.get("metrics")), *_leaves(settings.get("weighted_metrics")), *metrics_of(model)]
    return (
        any(map(_is_own_layer, flatten_layers(model)))
        or any(map(_is_own_operation, operations_of(model)))
        or any(not takes_samples_alone(each) for each in losses)
        or any(_is_own_metric(each) for each in metrics)
    )


def _leaves(nest: Any) -> list[Any]:
    if isinstance(nest, dict):
        return [leaf for each in nest.values() for leaf in _leaves(each)]
    if isinstance(nest, list | tuple):
        return [leaf for each in nest for leaf in _leaves(each)]
    return [] if nest is None or isinstance(nest, str) else [nest]


def _is_own_layer(layer: Any) -> bool:
    if _is_foreign(layer) or isinstance(layer, keras.layers.Lambda):
        return True
    functions = (getattr(layer, name, None) for name in ("activation", "recurrent_activation", "activity_regularizer"))
    return any(each is not None and _is_foreign(each) for each in functions)


def _is_own_operation(operation: Any) -> bool:
    """Return whether an operation of keras.ops in a model's graph may put samples together."""
    return not isinstance(operation, keras.layers.Layer)


def _is_own_metric(metric: Any) -> bool:
    function = function_of_metric(metric) if isinstance(metric, keras.metrics.Metric) else metric
    return _is_foreign(metric) or (function is not None and _is_foreign(function))


def takes_samples_alone(loss: Any) -> bool:
    """Return whether a loss of Keras' own gives each sample a value that no other sample has part in."""
    function, arguments = function_of_loss(loss)
    if not getattr(function, "__module__", "").startswith("keras.") or function is keras.losses.circle:
        return False
    axes = np.atleast_1d(arguments.get("axis", -1))
    return all(axis is not None and axis != 0 for axis in axes)


def _is_foreign(thing: Any) -> bool:
    module = getattr(thing, "__module__", type(thing).__module__)  # of a function, its own
    return str(module).split(".")[0] not in ("keras", "keras_hub", "hvdtrain")
