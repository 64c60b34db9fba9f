"""Model families, and helpers for their builders."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras

Rules: TypeAlias = Mapping[str, Sequence[str | None]]
"""Layouts of variables by regular expressions of their paths, as `hvdtrain.parallelize` takes them."""


@dataclass(frozen=True)
class ModelFamily:
    """A builder of models, with their default loss and metrics."""

    build: Callable[..., keras.Model]
    """(input shape, classes, seed, **arguments) -> a built model."""
    loss: Callable[[], Any]
    """Returns the loss for `Trainer`."""
    metrics: Callable[[], Any]
    """Returns the metrics for `Trainer`, new objects at each call."""
    build_sharded: Callable[..., keras.Model] | None = None
    """(input shape, classes, seed, sharding, **arguments) -> the model with its embedding tables divided among ranks;
    None for a family without tables."""
    sample_dims: tuple[str, ...] | dict[str, tuple[str, ...]] | None = None
    """Names of the dims of a sample, by input if there are several; None for a model of one input of any shape."""
    rules: Callable[..., Rules] | None = None
    """(classes, ranks, **arguments) -> how the model is split along tp; None for one that nobody has split."""


def classifier(
    build: Callable[..., keras.Model], *sample_dims: str, rules: Callable[..., Rules] | None = None
) -> ModelFamily:
    """Return the family of a builder of classifiers: cross-entropy of logits, and accuracy."""
    return ModelFamily(
        build=build,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        sample_dims=sample_dims or None,
        rules=rules,
    )


def glorot(seed: int, path: str) -> keras.initializers.Initializer:
    """Return a Glorot uniform initializer whose values are a function of (seed, path)."""
    return keras.initializers.GlorotUniform(seed=path_seed(seed, path))


def path_seed(seed: int, path: str) -> int:
    """Derive a variable's seed from the run's seed and the variable's path."""
    return zlib.crc32(f"{seed}/{path}".encode()) & 0x7FFFFFFF
