"""Model families, and helpers for their builders."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import keras

Rules: TypeAlias = Mapping[str, Sequence[str | None]]
"""Layout rules by regular expression of variable paths, as for `hvdtrain.parallelize`."""


@dataclass(frozen=True)
class ModelFamily:
    """A model builder with its default loss and metrics."""

    build: Callable[..., keras.Model]
    """(input shape, classes, seed, **arguments) -> a built model."""
    loss: Callable[[], Any]
    """Returns the loss for `Trainer`."""
    metrics: Callable[[], Any]
    """Returns the metrics for `Trainer`, new objects on each call."""
    shards_tables: bool = False
    """Whether `build` takes the sharding of its embedding tables as a fourth argument."""
    sample_dims: tuple[str, ...] | dict[str, tuple[str, ...]] | None = None
    """Names of a sample's dims, by input if there are several; None: one input of any shape."""
    rules: Callable[..., Rules] | None = None
    """(classes, ranks, **arguments) -> layout rules for tp; None if unsupported."""


def classifier(
    build: Callable[..., keras.Model], *sample_dims: str, rules: Callable[..., Rules] | None = None
) -> ModelFamily:
    """Return a classifier family: cross-entropy of logits, and accuracy."""
    return ModelFamily(
        build=build,
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=lambda: [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        sample_dims=sample_dims or None,
        rules=rules,
    )


def dense(x: Any, units: int, seed: int, name: str, **options: Any) -> Any:
    """Apply a dense layer whose initial kernel depends on (seed, name)."""
    # He et al. 2015, "Delving Deep into Rectifiers": keeps the size of activations over any number of layers.
    initializer = keras.initializers.HeNormal(seed=path_seed(seed, name))
    return keras.layers.Dense(units, kernel_initializer=initializer, name=name, **options)(x)


def path_seed(seed: int, path: str) -> int:
    """Derive a variable's seed from the run's seed and the variable's path."""
    return zlib.crc32(f"{seed}/{path}".encode()) & 0x7FFFFFFF
