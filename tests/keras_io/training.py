"""What an example gives: a model with the data to train it, or a loop of its own; and random data for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import keras
import numpy as np

import hvdtrain

SAMPLES, BATCH, EPOCHS = 27, 8, 2
"""The last batch has three samples: of two ranks one has a single one."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Arguments of `fit` for a compiled model.

    Datasets have batches of `BATCH` samples already.
    """

    model: keras.Model
    x: Any
    y: Any = None
    fit: Mapping[str, Any] = field(default_factory=dict)
    """Others, such as `class_weight`."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the trainer."""


class Steps(Protocol):
    """What a loop of an example's own is given."""

    def compiled(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Compile a step: by `tf.function`, or by `hvdtrain.whole_batch`."""

    def mine(self, *arrays: Any) -> list[Any]:
        """Return this rank's samples of a batch's arrays."""


@dataclass(frozen=True)
class Loop:
    """A loop of an example's own.

    Args:
        run: trains, and returns arrays to compare, such as weights, and a History.
    """

    run: Callable[[Steps], tuple[list[Any], dict[str, list[float]]]]


def batch_normalization(**options: Any) -> Any:
    """Return the layer, or on ranks the one with the statistics of all of them.

    Layers within subclassed models are replaced in their code; for others there is the option `sync_batch_norm`.
    """
    kind = hvdtrain.SyncBatchNormalization if hvdtrain.is_initialized() else keras.layers.BatchNormalization
    return kind(**options)


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    """Return normal numbers for each sample."""
    return np.random.default_rng(seed).standard_normal((SAMPLES, *shape))


def images(size: int = 8, channels: int = 1, seed: int = 0, samples: int = SAMPLES) -> np.ndarray:
    """Return images with values in [0, 1)."""
    return np.random.default_rng(seed).random((samples, size, size, channels))


def classes(count: int = 3, *shape: int, seed: int = 1) -> np.ndarray:
    """Return a class for each sample, or each of its positions."""
    return np.random.default_rng(seed).integers(0, count, (SAMPLES, *shape))


def tokens(length: int = 6, vocabulary: int = 11, seed: int = 2) -> np.ndarray:
    """Return sentences of tokens from 1, padded with 0."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, vocabulary, (SAMPLES, length))
    ends = rng.integers(2, length + 1, SAMPLES)
    return np.where(np.arange(length) < ends[:, None], words, 0)
