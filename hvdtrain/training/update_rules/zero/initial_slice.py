"""This replica's slice of a variable's initial value, kept while the whole one is given back."""

from typing import Any

import tensorflow as tf

from hvdtrain.compat.keras_variables import LazyVariable, declared_dtype
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.state.initial_values import checksum, drawn
from hvdtrain.state.memory import fill_memory, free_memory
from hvdtrain.state.variables import unwrap
from hvdtrain.training.update_rules.zero.out_of_reach import out_of_reach

_ATTRIBUTE = "_hvdtrain_initial_slice"


class InitialSlice:
    """A slice of the value that a Keras variable has before the first step, flat in row-major order.

    Args:
        variable: the Keras variable, whose `_value` may not be there yet.
        begin: the first of its elements.
        end: the element behind the last.
        initializer: draws the whole value, the same whenever it is called; None: nothing does.
    """

    def __init__(self, variable: Any, begin: int, end: int, initializer: Any = None) -> None:
        self.variable = variable
        self.kind = type(variable)
        self.begin, self.end = begin, end
        self.initializer = initializer
        self.values: tf.Tensor | None = None
        """[end - begin]."""
        self.checksum = 0
        """CRC-32 of the whole value."""
        self.assigned = False
        """Whether something else than the initial value was assigned since."""
        vars(variable)[_ATTRIBUTE] = self

    @property
    def seed(self) -> int | None:
        """The initializer's seed; None where it has none, or drew another value than the variable's."""
        seed = getattr(self.initializer, "seed", None)
        return seed if isinstance(seed, int) and not self.assigned else None

    def draw(self) -> tf.Tensor:
        """Return the whole initial value."""
        assert self.initializer is not None, "only what an initializer drew is drawn again"
        return drawn(self.initializer, self.variable)

    def keep(self, whole: Any) -> None:
        """Keep the slice of a whole value, in memory of its own."""
        flat = tf.reshape(tf.convert_to_tensor(whole), [-1])
        self.values = tf.raw_ops.DeepCopy(x=flat[self.begin : self.end])
        self.checksum = checksum(whole)

    def show_drawn(self) -> None:
        """Let the variable be drawn again whenever it is read, as a builder may do."""
        self.variable.__class__ = DrawnWhenRead

    def close(self) -> None:
        """Free the whole value, which can be neither looked at nor assigned to from here on."""
        free_memory(unwrap(self.variable))
        self.variable.__class__ = out_of_reach(self.kind)

    def fill(self, whole: tf.Tensor) -> None:
        """Let the variable be an ordinary one that holds these values."""
        fill_memory(unwrap(self.variable), tf.reshape(whole, tuple(self.variable.shape)))
        self.variable.__class__ = self.kind
        vars(self.variable).pop(_ATTRIBUTE)


class DrawnWhenRead(LazyVariable):
    """A Keras variable of which only a slice is in memory, and that looks whole to the builder of a model."""

    def read(self) -> Any:
        """Return the whole initial value, drawn again; of a function that is being traced the variable."""
        initial = initial_slice_of(self)
        if initial is None or not tf.executing_eagerly():
            return None
        if initial.assigned:
            raise ConfigError(
                f"{opt('zero', 3)} keeps slices of the parameters while a function builds the model: what it assigns "
                "to a "
                f"variable cannot be read again. Received: a look at {self.path} after an assignment to it. Read it "
                "before, or give Trainer the built model in place of the function."
            )
        return initial.draw()

    def write(self, value: Any) -> None:
        """Keep this rank's slice of a whole value."""
        initial = initial_slice_of(self)
        assert initial is not None, "only slices are of this class"
        initial.assigned = True
        initial.keep(tf.cast(value, declared_dtype(self)))


def initial_slice_of(variable: Any) -> InitialSlice | None:
    """Return the slice that was kept of a variable's initial value, if one was and nobody has taken it."""
    found: InitialSlice | None = getattr(variable, _ATTRIBUTE, None)
    return found


def taken_slice(variable: Any) -> InitialSlice | None:
    """Return the same, which nobody else finds from here on: the variable's memory stays free."""
    found = initial_slice_of(variable)
    if found is not None:
        del vars(variable)[_ATTRIBUTE]
    return found
