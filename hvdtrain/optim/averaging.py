"""Exponential moving averages of a model's weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


def averages_weights(optimizer: Any) -> bool:
    """Return whether `optimizer`, wrapped or not, keeps an EMA of weights."""
    return bool(innermost(optimizer).use_ema)


@contextmanager
def averaged_weights(optimizer: Any, model: Any) -> Iterator[None]:
    """Swap the EMA into the trainable weights of `model` inside this context.

    No effect for an optimizer without EMA or before its first step. Ranks hold the same averages, so there is no
    communication. Moving statistics of BatchNormalization are unchanged. Do not train the model inside the context.
    Needs memory for one more copy of the weights.

    Keras' average a of weights w with momentum m is a <- m a + (1 - m) w after each step, and a = w after the first:
    neither its initial zeros nor weights from before a broadcast enter it.
    """
    from hvdtrain.compat.keras_variables import average_of  # a script of Keras 2 does without Keras 3

    inner = innermost(optimizer)
    averages = [(v, average_of(inner, v)) for v in model.trainable_variables] if has_averages(optimizer) else []
    with replaced_weights([(variable, average) for variable, average in averages if average is not None]):
        yield


def has_averages(optimizer: Any) -> bool:
    """Return whether `optimizer` holds an EMA, after at least one step."""
    inner = innermost(optimizer)
    return bool(inner.use_ema and inner.built and int(tf.convert_to_tensor(inner.iterations)) > 0)


@contextmanager
def replaced_weights(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Assign values to variables inside this context; restore them on exit."""
    own = [tf.identity(variable.value) for variable, _ in values]
    try:
        for variable, value in values:
            variable.assign(value)
        yield
    finally:
        for (variable, _), value in zip(values, own, strict=True):
            variable.assign(value)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside any Keras 3 or 2 wrappers."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer
