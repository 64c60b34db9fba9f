"""Swapping a model's weights for their exponential moving average."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf


def averages_weights(optimizer: Any) -> bool:
    """Whether `optimizer`, possibly wrapped (LossScaleOptimizer …), keeps averages of the weights."""
    return bool(innermost(optimizer).use_ema)


@contextmanager
def averaged_weights(optimizer: Any, model: Any) -> Iterator[None]:
    """Swap in the averages that `optimizer` keeps of the trainable weights of `model`; swap back on exit.

    Optimizers without averages, or that took no step yet, change nothing. Ranks hold the same averages, so nothing is
    exchanged. The moving statistics of BatchNormalization stay. Do not train the model inside the context. Takes memory
    for one more copy of the weights.

    Keras' average a of weights w with momentum m is a <- m a + (1 - m) w after each step, and a = w after the first:
    neither the zeros it is created with nor weights from before a broadcast enter it.
    """
    from hvdtrain.compat.keras_variables import average_of  # a script of Keras 2 does without Keras 3

    inner = innermost(optimizer)
    averages = [(v, average_of(inner, v)) for v in model.trainable_variables] if has_averages(optimizer) else []
    with replaced_weights([(variable, average) for variable, average in averages if average is not None]):
        yield


def has_averages(optimizer: Any) -> bool:
    """Tell whether `optimizer` holds averages of the weights by now, after at least one step."""
    inner = innermost(optimizer)
    return bool(inner.use_ema and inner.built and int(tf.convert_to_tensor(inner.iterations)) > 0)


@contextmanager
def replaced_weights(values: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Give each variable its value inside the context, and its own back on exit."""
    own = [tf.identity(variable.value) for variable, _ in values]
    try:
        for variable, value in values:
            variable.assign(value)
        yield
    finally:
        for (variable, _), value in zip(values, own, strict=True):
            variable.assign(value)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside any wrappers, of Keras 3 or 2; one whose `inner_optimizer` is None wraps nothing."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer
