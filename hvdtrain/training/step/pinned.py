"""Passes that read given values in place of variables, and leave the variables as they are."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.state.variables import unwrap


class PinnedScope(keras.StatelessScope):
    """Keras' scope of values in place of those of variables.

    With `reads` it gives regularizers, which ask it for their variables, what is read of them when they ask: gradients
    reach the variables.
    """

    def __init__(self, values: Sequence[tuple[Any, Any]], *, reads: bool) -> None:
        super().__init__(values, collect_losses=True)
        self._reads = reads

    def get_current_value(self, variable: Any) -> Any:
        """Return the value to be read in the scope; None: the variable's own."""
        value = self.assigned(variable)
        asked = self._reads and value is None and variable.regularizer is not None
        return tf.convert_to_tensor(unwrap(variable)) if asked else value

    def assigned(self, variable: Any) -> Any:
        """Return the value that was given or assigned; None: neither."""
        return super().get_current_value(variable)


@contextmanager
def pinned(values: Sequence[tuple[Any, Any]], others: Iterable[Any], *, reads: bool = False) -> Iterator[Any]:
    """Override the values of Keras variables and discard assignments to them.

    With several workers, read-modify-write updates of a counter would be lost. Values derived from such a counter are
    instead functions of the step's own number.

    Args:
        values: pairs of a Keras variable and a tensor.
        others: Keras variables whose assignments in the context are kept.
        reads: whether regularizers are called in the context.
    """
    with PinnedScope(values, reads=reads) as scope:
        yield scope
    for variable in others:
        value = scope.assigned(variable)
        if value is not None:
            variable.assign(value)
