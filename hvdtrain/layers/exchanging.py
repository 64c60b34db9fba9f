"""Layers that exchange with other ranks what belongs to their samples."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.placement import placement_of


class ExchangingLayer(keras.layers.Layer):
    """A layer that works on samples of other ranks as well as on this rank's own.

    A rank without samples in a step holds a placeholder in their place, which must add nothing to others' gradients.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.has_samples: Any = 1.0
        """1, or 0 (a number or a scalar tensor) while this rank's samples are a placeholder that must not count."""
        self.built_in_session = True
        """Whether there was a session when it was built, which has told it of the other ranks."""

    @property
    def exchanges(self) -> bool:
        """Whether there are other ranks to exchange with; known once it is built."""
        return self.divided

    @property
    def divided(self) -> bool:
        """Whether ranks along `ep` hold different slices of its variables; known once it is built."""
        return any((p := placement_of(v)) is not None and "ep" in p.held_by for v in self.variables)

    @property
    def counters(self) -> list[tf.Variable]:
        """What the layer counts besides its weights, of each call in training once."""
        return []

    def save_own_variables(self, store: Any) -> None:
        """Save the variables, as Keras asks for in `model.save` and `save_weights`.

        Raises:
            ConfigError: this rank holds slices of them, with which no file could be loaded.
        """
        sliced = next((v for v in self.variables if (p := placement_of(v)) is not None and p.axes), None)
        if sliced is not None:
            raise ConfigError(
                f"Each rank holds a slice of {sliced.path}, and none can write the model by itself: write checkpoints "
                "by Trainer.save, fit(checkpoint=…) or --checkpoint-every, and a whole file from one of them by "
                "python -m hvdtrain checkpoint export."
            )
        super().save_own_variables(store)

    def unless_placeholder(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return `tensor`, or zeros of a placeholder, whose gradients are zero too; 0 x inf would be NaN."""
        if not tf.is_tensor(self.has_samples) and self.has_samples:
            return tensor
        return tf.where(tf.cast(self.has_samples, tf.float32) > 0, tensor, tf.zeros_like(tensor))


def exchanging_layers(model: Any) -> list[ExchangingLayer]:
    """Return the layers of `model`, nested ones too, that exchange samples with other ranks."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, ExchangingLayer)]


@contextmanager
def samples_of(layers: Sequence[ExchangingLayer], has_samples: Any) -> Iterator[None]:
    """Count this rank's samples in `layers` inside this context if `has_samples` is 1.

    The previous settings are restored: a symbolic `has_samples` is invalid outside its function.
    """
    before = [layer.has_samples for layer in layers]
    try:
        for layer in layers:
            layer.has_samples = has_samples
        yield
    finally:
        for layer, value in zip(layers, before, strict=True):
            layer.has_samples = value
