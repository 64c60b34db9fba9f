"""This replica's shard of a variable's initial value."""

from typing import Any

import tensorflow as tf

from hvdtrain.compat.keras_variables import LazyVariable, declared_dtype, is_inferring_shapes
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.state.initial_values import checksum, initial_value
from hvdtrain.state.variables import fill_memory, free_memory, unwrap

_ATTRIBUTE = "_hvdtrain_initial_slice"


class InitialSlice:
    """Elements `begin` to `end` of a Keras variable's flattened initial value.

    The variable may lack a `_value`; `initializer` is deterministic, or None if the value is not reproducible.
    """

    def __init__(self, variable: Any, begin: int, end: int, initializer: Any = None) -> None:
        self.variable = variable
        self.kind = type(variable)
        self.begin, self.end = begin, end
        self.initializer = initializer
        self.values: tf.Tensor | None = None
        """[end - begin]."""
        self.checksum = 0
        """CRC-32 of the full value."""
        self.assigned = False
        """Whether it was assigned after initialization."""
        vars(variable)[_ATTRIBUTE] = self

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
        """Re-run the initializer whenever the variable is read, as by a builder."""
        self.variable.__class__ = ShardedWhileBuilding

    def close(self) -> None:
        """Free the full value; the variable can no longer be read or assigned."""
        free_memory(unwrap(self.variable))
        self.variable.__class__ = out_of_reach(self.kind)

    def fill(self, whole: tf.Tensor) -> None:
        """Turn the variable into a regular one with this value."""
        fill_memory(unwrap(self.variable), tf.reshape(whole, tuple(self.variable.shape)))
        self.variable.__class__ = self.kind
        vars(self.variable).pop(_ATTRIBUTE)


class ShardedWhileBuilding(LazyVariable):
    """Keras variable that stores a shard but looks full while building."""

    def read(self) -> Any:
        """Return the full initial value, recomputed; while tracing, the variable itself."""
        initial = initial_slice_of(self)
        if initial is None or not tf.executing_eagerly():
            return None
        if initial.assigned:
            raise ConfigError(
                f"{opt('zero', 3)} keeps slices of the parameters while a function builds the model: what it assigns "
                f"to a variable cannot be read again. Received: a look at {self.path} after an assignment to it. Read "
                "it before, or give Trainer the built model in place of the function."
            )
        return initial.draw()

    def write(self, value: Any) -> None:
        """Keep this rank's shard of a full value."""
        initial = initial_slice_of(self)
        assert initial is not None, "only slices are of this class"
        initial.assigned = True
        initial.keep(tf.cast(value, declared_dtype(self)))


def initial_slice_of(variable: Any) -> InitialSlice | None:
    """Return a variable's initial shard, unless it was taken."""
    found: InitialSlice | None = getattr(variable, _ATTRIBUTE, None)
    return found


def taken_slice(variable: Any) -> InitialSlice | None:
    """Return and remove a variable's initial shard; its memory stays free."""
    found = initial_slice_of(variable)
    if found is not None:
        del vars(variable)[_ATTRIBUTE]
    return found


def out_of_reach(kind: type) -> type:
    """Return a Keras variable subclass that refuses reads and assignments."""

    def refuse(variable: Any, *arguments: Any, **named: Any) -> Any:
        raise ConfigError(
            f"Before the first step and between two steps {opt('zero', 3)} keeps slices of the parameters. Received: a "
            f"look at, or an assignment to, all of {variable.path}, as after a training that ended with an error. Call "
            "trainer.consolidate() on every rank before."
        )

    def value(variable: Any) -> Any:
        return kind.value.fget(variable) if is_inferring_shapes() else refuse(variable)  # type: ignore[attr-defined]

    members = {"__array__": refuse, "numpy": refuse, "assign": refuse, "value": property(value)}
    return type(kind.__name__, (kind,), members)
