"""Variables that are made as slices, while a model is built as if they were whole.

A layer learns the shapes of its variables from those before it, and a custom layer calls its inner ones while it is
built: both must see whole variables. So while a builder runs, a variable that a rule matches holds its slice alone, and
gives its whole shape, and draws its initial value again if somebody reads it. No more than one such variable is whole
in memory at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.rules import LayoutRules
from hvdtrain.state.initial_values import checksum, keras_variable


@dataclass
class Made:
    """A variable that was made as a slice."""

    variable: Any
    cut: Cut
    initializer: Callable[..., Any]
    drawn: int
    """CRC-32 of the whole initial value."""
    assigned: bool = False
    """Whether something else than its initial value was assigned since."""


@dataclass
class Building:
    """The variables that a builder has made as slices, by id."""

    rules: LayoutRules
    index: int
    ranks: int
    made: dict[int, Made] = field(default_factory=dict)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Make the variables that the rules match as slices inside this context."""
        with tf.variable_creator_scope(self._create):
            yield

    def _create(self, next_creator: Callable[..., Any], **options: Any) -> Any:
        owner, initializer = keras_variable(options.get("initial_value"))
        cut = None if owner is None else self.rules.cut_of(owner.path, owner._shape, self.index, self.ranks)
        if owner is None or initializer is None or cut is None:
            return next_creator(**options)
        value, drawn = drawn_slice(initializer, owner, cut)
        tensor = next_creator(**{**options, "initial_value": value})
        self.made[id(owner)] = Made(owner, cut, initializer, drawn)
        _look_whole(owner, self.made[id(owner)])
        return tensor

    def finish(self) -> list[Made]:
        """Let all variables be what they are, slices, and return them."""
        for made in self.made.values():
            made.variable.__class__ = keras.Variable
            made.variable._shape = made.cut.shape
        return list(self.made.values())


def drawn_slice(initializer: Callable[..., Any], variable: Any, cut: Cut) -> tuple[tf.Tensor, int]:
    """Return this rank's slice of a variable's initial value, and the CRC-32 of the whole."""
    whole = tf.cast(initializer(cut.whole, dtype=variable._dtype), variable._dtype)
    return cut.slice_of(whole), checksum(whole)


def _look_whole(variable: Any, made: Made) -> None:
    variable.__class__ = WholeWhileBuilding
    vars(variable)["_hvdtrain_made"] = made


class WholeWhileBuilding(keras.Variable):
    """A Keras variable that holds a slice, and looks whole to the builder of a model."""

    @property
    def value(self) -> Any:
        """The whole initial value, drawn again; of a function that is being traced a stand-in of its shape."""
        made: Made = vars(self)["_hvdtrain_made"]
        if not tf.executing_eagerly():
            return self._maybe_autocast(tf.zeros(made.cut.whole, self._dtype))
        if made.assigned:
            raise ConfigError(
                f"The variable {self.path!r} is made as a slice, and was given another value while the model was "
                "built: it cannot be read as a whole before the model is finished. Read it before it is assigned, or "
                "assign it last."
            )
        return self._maybe_autocast(tf.cast(made.initializer(made.cut.whole, dtype=self._dtype), self._dtype))

    def _direct_assign(self, value: Any) -> None:
        """Keep this rank's slice of a whole value."""
        made: Made = vars(self)["_hvdtrain_made"]
        made.assigned = True
        made.drawn = checksum(value)
        self._value.assign(made.cut.slice_of(tf.cast(value, self._value.dtype)))


def cut_in_place(variable: Any, cut: Cut) -> None:
    """Let a whole Keras variable hold its slice alone."""
    whole = tf.convert_to_tensor(variable._value)
    sliced = tf.Variable(
        cut.slice_of(whole), trainable=variable._value.trainable, name=variable.name, dtype=variable._value.dtype
    )
    variable._value = sliced
    variable._shape = cut.shape
