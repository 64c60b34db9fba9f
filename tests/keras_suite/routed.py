"""A pytest plugin: in Keras' own tests `fit`, `evaluate` and `predict` of a model go through `hvdtrain.Trainer`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import keras

import hvdtrain
from hvdtrain.compat.keras import last_compile

METHODS = ("fit", "evaluate", "predict")
TRAINER = keras.Model.__mro__[1]
"""Keras' class with these methods."""


class Route:
    """Calls a model's trainer in place of Keras' own method, but not within another such call."""

    def __init__(self) -> None:
        self._inside = False

    def through(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method `name`, routed."""

        @wraps(original)
        def call(model: Any, *args: Any, **options: Any) -> Any:
            if self._inside or not isinstance(model, keras.Model):
                return original(model, *args, **options)
            self._inside = True
            try:
                return getattr(_trainer_of(model), name)(*args, **options)
            finally:
                self._inside = False

        return call


def _trainer_of(model: Any) -> hvdtrain.Trainer:
    """Return the trainer of a model's last `compile`."""
    compiled, trainer = vars(model).get("_routed", (None, None))
    if trainer is None or compiled is not last_compile(model):
        trainer = hvdtrain.Trainer(model)
        object.__setattr__(model, "_routed", (last_compile(model), trainer))
    return trainer


def pytest_configure() -> None:
    """Route the methods, once."""
    hvdtrain.init()
    route = Route()
    for name in METHODS:
        setattr(TRAINER, name, route.through(name, getattr(TRAINER, name)))
