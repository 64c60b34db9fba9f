"""The user's optimizer, which an update rule builds for variables of its own, and gives back after a training."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.compat.keras_variables import forget_slots, track_variables
from hvdtrain.config.errors import in_script
from hvdtrain.optim.averaging import innermost
from hvdtrain.state.optimizers import chain_of, replicated_slots
from hvdtrain.state.structure import structure_of

_FILES = "save_own_variables"
"""Keras' hook by which an optimizer, also one within another, writes its variables to a file."""


class LentOptimizer:
    """An optimizer with slots for the variables of a rule, until they are exchanged for those of the model.

    Args:
        option: the rule's, for messages.
    """

    def __init__(self, optimizer: Any, option: str) -> None:
        self._optimizer = optimizer
        self._chain = list(chain_of(optimizer))
        self._option = option
        self._lent: list[dict[str, Any]] | None = None
        """Attributes of each optimizer in the chain that differ while it is given back: those with the rule's slots."""
        self._told = False

    @property
    def given_back(self) -> bool:
        """Whether it has the model's slots, or none, and not the rule's."""
        return self._lent is not None

    def keep_from_files(self) -> None:
        """Let files of Keras have none of the slots, which would be taken for those of whole variables."""
        for each in self._chain:
            vars(each)[_FILES] = self._tell

    def _tell(self, store: Any) -> None:
        if not self._told:
            warnings.warn(
                f"{in_script(self._option)} keeps the optimizer's slots by parts: the file has none of them. "
                "trainer.save(FOLDER) and fit(checkpoint=FOLDER) save all. After fit a model that was compiled with "
                f"its optimizer has them whole: model.compile({type(innermost(self._optimizer)).__name__}(…), loss), "
                "Trainer(model).",
                stacklevel=2,
            )
        self._told = True

    def give_back(self, model: Any, slots: Mapping[str, Any] | None) -> None:
        """Exchange the rule's slots for the model's, with the values of `slots` by path; None: it has none until built.

        Steps, learning rate and all settings stay.
        """
        before = [dict(vars(each)) for each in self._chain]
        for each in self._chain:
            forget_slots(each)
        if slots is not None:
            for each in self._chain:
                vars(each).pop(_FILES, None)
            self._optimizer.build(model.trainable_variables)
            for path, tensor in replicated_slots(self._optimizer, structure_of(model)).items():
                tensor.value.assign(slots[path.removeprefix("optimizer/")])
        self._lent = [
            {name: value for name, value in own.items() if vars(each).get(name, self) is not value or _may_hold(value)}
            for each, own in zip(self._chain, before, strict=True)
        ]
        self._told = False

    def take_back(self, model: Any) -> dict[str, tf.Variable]:
        """Exchange the model's slots for the rule's; return the former, by path, if there are any."""
        if self._lent is None:
            return {}
        slots = replicated_slots(self._optimizer, structure_of(model)) if self._optimizer.built else {}
        for each, own in zip(self._chain, self._lent, strict=True):
            vars(each).update(own)
            track_variables(each)
        self._lent = None
        return {path.removeprefix("optimizer/"): tensor.value for path, tensor in slots.items()}


def _may_hold(value: Any) -> bool:
    """Return whether an attribute may hold slots, which Keras makes anew where it builds the optimizer later."""
    return isinstance(value, list | dict | set)


@contextmanager
def without_slots(optimizer: Any) -> Iterator[None]:
    """Let `optimizer`, wrapped or not, be built for other variables inside this context; its slots are back after it.

    Steps and learning rate stay. So does all that a user has set and that a configuration does not hold.
    """
    chain = list(chain_of(optimizer))
    before = [dict(vars(each)) for each in chain]
    for each in chain:
        forget_slots(each)
    try:
        yield
    finally:
        for each, own in zip(chain, before, strict=True):
            vars(each).clear()
            vars(each).update(own)
            track_variables(each)
