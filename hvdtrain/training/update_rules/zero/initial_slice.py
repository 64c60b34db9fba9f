"""This replica's shard of a variable's initial value, and what stands for a variable whose memory is free."""

from typing import Any

import tensorflow as tf

from hvdtrain.compat.keras_variables import VariableState, declared_dtype, is_inferring_shapes, set_state, state_of
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.state.initial_values import checksum, initial_value
from hvdtrain.state.variables import fill_memory, free_memory, unwrap


class Released(VariableState):
    """State of a variable whose memory is free: it cannot be read or assigned."""

    def read(self, variable: Any) -> None:
        """Refuse, but where only shapes are inferred. Raises ConfigError."""
        if not is_inferring_shapes():
            self.write(variable, None)

    def write(self, variable: Any, value: Any) -> None:
        """Refuse. Raises ConfigError."""
        raise ConfigError(
            f"Before the first step and between two steps {opt('zero', 3)} keeps slices of the parameters. Received: a "
            f"look at, or an assignment to, all of {variable.path}, as after a training that ended with an error. Call "
            "trainer.consolidate() on every rank before."
        )


class InitialSlice(Released):
    """Elements `begin` to `end` of a Keras variable's flattened initial value.

    While a function builds the model, the variable looks full. It may lack a `_value`; `initializer` is deterministic,
    or None if the value is not reproducible.
    """

    def __init__(self, variable: Any, begin: int, end: int, initializer: Any = None) -> None:
        self.variable = variable
        self.begin, self.end = begin, end
        self.initializer = initializer
        self.values: tf.Tensor | None = None
        """[end - begin]."""
        self.checksum = 0
        """CRC-32 of the full value."""
        self.assigned = False
        """Whether it was assigned after initialization."""
        self._building = False

    @property
    def seed(self) -> int | None:
        """The initializer's seed; None if it has none, or the variable was assigned."""
        seed = getattr(self.initializer, "seed", None)
        return seed if isinstance(seed, int) and not self.assigned else None

    def draw(self) -> tf.Tensor:
        """Return the full initial value."""
        assert self.initializer is not None, "only what an initializer drew is drawn again"
        return initial_value(self.initializer, self.variable)

    def keep(self, whole: Any) -> None:
        """Copy the shard of a full value."""
        flat = tf.reshape(tf.convert_to_tensor(whole), [-1])
        self.values = tf.raw_ops.DeepCopy(x=flat[self.begin : self.end])
        self.checksum = checksum(whole)

    def show_drawn(self) -> None:
        """Free the full value, and re-run the initializer whenever the variable is read, as by a builder."""
        self._building = True
        set_state(self.variable, self)

    def close(self) -> None:
        """Free the full value; the variable can no longer be read or assigned."""
        self._building = False
        free_memory(unwrap(self.variable))
        set_state(self.variable, self)

    def fill(self, whole: tf.Tensor) -> None:
        """Turn the variable into a regular one with this value."""
        fill_memory(unwrap(self.variable), tf.reshape(whole, tuple(self.variable.shape)))
        set_state(self.variable, None)

    def read(self, variable: Any) -> Any:
        """Return the full initial value, recomputed; while tracing, the variable itself. Raises ConfigError."""
        if not self._building:
            return super().read(variable)
        if not tf.executing_eagerly():
            return None
        if self.assigned:
            raise ConfigError(
                f"{opt('zero', 3)} keeps slices of the parameters while a function builds the model: what it assigns "
                f"to a variable cannot be read again. Received: a look at {variable.path} after an assignment to it. "
                "Read it before, or give Trainer the built model in place of the function."
            )
        return self.draw()

    def write(self, variable: Any, value: Any) -> None:
        """Keep this rank's shard of a full value."""
        if not self._building:
            super().write(variable, value)
        self.assigned = True
        self.keep(tf.cast(value, declared_dtype(variable)))


def initial_slice_of(variable: Any) -> InitialSlice | None:
    """Return a variable's initial shard, unless it was taken."""
    state = state_of(variable)
    return state if isinstance(state, InitialSlice) else None


def taken_slice(variable: Any) -> InitialSlice | None:
    """Return and remove a variable's initial shard; its memory stays free."""
    found = initial_slice_of(variable)
    if found is not None:
        set_state(variable, Released())
    return found
