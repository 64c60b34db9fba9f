"""What a model family offers to a recipe."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras


@dataclass(frozen=True)
class ModelFamily:
    """A builder of models, and the loss and metrics they are trained with."""

    build: Callable[..., keras.Model]
    """(input shape, classes, seed, **arguments) -> a built model."""
    loss: Callable[[], Any]
    """Gives what `Trainer` takes as its loss."""
    metrics: Callable[[], Any]
    """Gives what `Trainer` takes as its metrics, new at each call."""
    sample_dims: tuple[str, ...] | dict[str, tuple[str, ...]] | None = None
    """What the dims of one sample are, by name if it has several inputs; None for a model that takes one of any."""


def classifier(build: Callable[..., keras.Model], *sample_dims: str) -> ModelFamily:
    """Return the family of a builder whose models give logits of classes, with what such models are trained for."""
    return ModelFamily(
        build=build,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        sample_dims=sample_dims or None,
    )


def glorot(seed: int, path: str) -> keras.initializers.Initializer:
    """Return a Glorot uniform initializer whose values are a function of (seed, path)."""
    return keras.initializers.GlorotUniform(seed=path_seed(seed, path))


def path_seed(seed: int, path: str) -> int:
    """Derive the seed of one variable from the run's."""
    return zlib.crc32(f"{seed}/{path}".encode()) & 0x7FFFFFFF
