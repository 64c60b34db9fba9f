"""Base of layers that exchange samples' data with other ranks."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.placement import placement_of


class ExchangingLayer(keras.layers.Layer):
    """A layer that also computes for other ranks' samples.

    A rank without samples in a step passes a placeholder, which must not contribute to gradients.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.has_samples: Any = 1.0
        """1, or 0 (a number or a scalar tensor) while this rank's samples are a placeholder."""
        self.built_in_session = True
        """Whether it was built within a session, so that it knows the other ranks."""

    @property
    def exchanges(self) -> bool:
        """Whether it communicates; known once built."""
        return self.divided

    @property
    def divided(self) -> bool:
        """Whether its variables are sharded along `ep`; known once built."""
        return any((p := placement_of(v)) is not None and "ep" in p.held_by for v in self.variables)

    @property
    def counters(self) -> list[tf.Variable]:
        """Variables, other than weights, that count each training call once."""
        return []

    def save_own_variables(self, store: Any) -> None:
        """Save the variables for `model.save`. Raises ConfigError for shards, which could not be loaded."""
        sliced = next((v for v in self.variables if (p := placement_of(v)) is not None and p.axes), None)
        if sliced is not None:
            raise ConfigError(
                f"Each rank holds a slice of {sliced.path}, and none can write the full model: write checkpoints "
                "by Trainer.save, fit(checkpoint=…) or --checkpoint-every, and a whole file from one of them by "
                "python -m hvdtrain checkpoint export."
            )
        super().save_own_variables(store)

    def unless_placeholder(self, tensor: tf.Tensor) -> tf.Tensor:
        """Return `tensor`, or zeros with zero gradients for a placeholder; 0 x inf would be NaN."""
        if not tf.is_tensor(self.has_samples) and self.has_samples:
            return tensor
        return tf.where(tf.cast(self.has_samples, tf.float32) > 0, tensor, tf.zeros_like(tensor))


def exchanging_layers(model: Any) -> list[ExchangingLayer]:
    """Return the ExchangingLayers of `model`, nested ones too."""
    return [layer for layer in flatten_layers(model) if isinstance(layer, ExchangingLayer)]


def samples_of(layers: Sequence[ExchangingLayer], has_samples: Any) -> AbstractContextManager[None]:
    """Set `has_samples` of `layers` inside the returned context."""
    return attributes_set(layers, has_samples=has_samples)


@contextmanager
def attributes_set(layers: Sequence[Any], **values: Any) -> Iterator[None]:
    """Set attributes of `layers` inside this context.

    Restored on exit: a symbolic value is invalid outside its function.
    """
    before = [{name: getattr(layer, name) for name in values} for layer in layers]
    try:
        for layer in layers:
            for name, value in values.items():
                setattr(layer, name, value)
        yield
    finally:
        for layer, earlier in zip(layers, before, strict=True):
            for name, value in earlier.items():
                setattr(layer, name, value)
