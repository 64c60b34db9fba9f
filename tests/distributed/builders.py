"""Tiny models, their data, and what one process makes of them; the checks compare trainings on ranks with these."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from world import moved, plain_training

SAMPLES, BATCH, EPOCHS = 70, 16, 4  # four full batches and one of 6 samples: 20 steps
WIDTH = 131
"""Of kernels whose elements neither 2 nor 4 ranks divide, and which ZeRO shards."""
TOLERANCE = {"float32": 1e-6, "float64": 1e-9}


def dense_model(dtype: str, seed: int) -> keras.Model:
    return _perceptron(dtype, seed, 6, 24)


def wide_model(dtype: str, seed: int) -> keras.Model:
    """Two kernels that ZeRO shards, a third one and biases that stay whole."""
    return _perceptron(dtype, seed, WIDTH, WIDTH, WIDTH)


def _perceptron(dtype: str, seed: int, features: int, *widths: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(width, activation="tanh", dtype=dtype) for width in widths]
    return keras.Sequential([keras.Input((features,), dtype=dtype), *hidden, keras.layers.Dense(3, dtype=dtype)])


def embedding_model(dtype: str, seed: int) -> keras.Model:
    return _lookup(dtype, seed, 11, 8)


def table_model(dtype: str, seed: int) -> keras.Model:
    """A table that ZeRO shards, with sparse gradients."""
    return _lookup(dtype, seed, 1201, 17)


def _lookup(dtype: str, seed: int, rows: int, width: int) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(rows, width, dtype=dtype),
            keras.layers.Flatten(dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )


def dense_data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return _features(dtype, 6)


def wide_data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return _features(dtype, WIDTH)


def _features(dtype: str, width: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((SAMPLES, width)).astype(dtype), rng.integers(0, 3, SAMPLES)


def embedding_data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    # 11 rows for 350 look-ups: every batch touches rows several times, on one rank and on several.
    return _rows(11)


def table_data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return _rows(40)


def _rows(touched: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    return rng.integers(0, touched, (SAMPLES, 5)).astype("int32"), rng.integers(0, 3, SAMPLES)


def per_sample(targets: Any, outputs: Any) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)


CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
"""The mean of `per_sample`, computed in 64 bits whatever Keras' floatx is."""


OPTIMIZERS = {
    "plain sgd": lambda: keras.optimizers.SGD(0.1),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
}
MODELS = {
    "dense": (dense_model, dense_data),
    "wide": (wide_model, wide_data),
    "embedding": (embedding_model, embedding_data),
    "table": (table_model, table_data),
}


def batches_of(x: np.ndarray, y: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    one = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(x), BATCH)]
    return one * EPOCHS


def trained_alone(kind: str, optimizer: str, dtype: str) -> list[np.ndarray]:
    """Train one of MODELS in this process on whole batches, and return its weights."""
    build, data = MODELS[kind]
    model = build(dtype, 0)
    start = [np.array(w) for w in model.get_weights()]
    weights = plain_training(model, OPTIMIZERS[optimizer](), per_sample, batches_of(*data(dtype)))
    assert_moved(weights, start)
    return weights


def assert_moved(weights: Sequence[np.ndarray], start: Sequence[np.ndarray]) -> None:
    assert moved(weights, start) >= 1e-2, "the weights hardly moved: the comparison says nothing"


def optimizers_of_keras() -> dict[str, type]:
    """Return the classes of keras.optimizers by name, without the base class and what wraps others."""
    left_out = {"LossScaleOptimizer", "MultiOptimizer", "Optimizer"}
    found = {
        name: kind
        for name, kind in vars(keras.optimizers).items()
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer) and name not in left_out
    }
    assert len(found) >= 13
    return found
