"""What a model is called with, as far as it tells, and models that are not built yet."""

from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import input_nest
from hvdtrain.config.errors import ConfigError

TRACED_BATCH = 7
"""Samples that a model is built and traced with: a size that no dim of its weights is likely to have."""


def built(model: Any, inputs: Any) -> Any:
    """Return `model`, or what it builds, with the variables of a class of the user's own created.

    It is called with a batch of one size: with any size a layer behind a reshape to (batch, length, -1) would not know
    the width that it is given.
    """
    made = model if isinstance(model, keras.Model) else model()
    if inputs is not None and isinstance(made, keras.Model) and not made.built:
        made(tf.nest.map_structure(lambda t: keras.KerasTensor((TRACED_BATCH, *t.shape[1:]), _dtype(t)), inputs))
    return made


def _dtype(tensor: Any) -> str:
    return str(tf.as_dtype(tensor.dtype).name)


def input_specs(model: Any, inputs: Any) -> Any:
    """Return shapes and dtypes of what the model is called with.

    Raises:
        ConfigError: the model does not tell.
    """
    if inputs is not None:
        return tf.nest.map_structure(spec_of_input, inputs)
    specs = symbolic_inputs(model)
    if specs is None:
        raise ConfigError(
            f"{type(model).__name__} {model.name!r} does not tell what it is called with, and its activations cannot "
            "be followed: give parallelize the shapes of a batch too, inputs=x[:1]."
        )
    return specs


def symbolic_inputs(model: Any) -> Any:
    """Return specs of the inputs of a Functional or Sequential model; None of one that does not tell them."""
    if isinstance(model, keras.Sequential):
        inputs = model.inputs[0] if model.built and model.inputs else None
    else:
        inputs = input_nest(model)
    return None if inputs is None else tf.nest.map_structure(spec_of_input, inputs)


def spec_of_input(tensor: Any) -> tf.TensorSpec:
    """Return shape and dtype of an input of any batch size."""
    return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype)
