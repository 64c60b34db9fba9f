"""Values that stand for variables which all workers share."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras


@contextmanager
def pinned(values: Sequence[tuple[Any, Any]], others: Iterable[Any]) -> Iterator[None]:
    """Let `values` be what Keras variables hold, and drop what is assigned to these.

    A counter that several workers read, add to and write would lose what one of them added between another's reading
    and writing. Here what a step derives from such a counter is a function of the step's own number instead.

    Args:
        values: pairs of a Keras variable and a tensor.
        others: Keras variables that keep, after the context, what is assigned to them within.
    """
    with keras.StatelessScope(values, collect_losses=True) as scope:
        yield
    for variable in others:
        value = scope.get_current_value(variable)
        if value is not None:
            variable.assign(value)
