"""Tiny models and data, the same each time."""

from typing import Any

import keras
import numpy as np

from hvdtrain.observability.events import RunInfo


def samples(count: int, features: int = 5, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs [count, features] and integer labels: which of an input's first `classes` values is the largest."""
    inputs = np.random.default_rng(0).standard_normal((count, features)).astype("float32")
    return inputs, np.argmax(inputs[:, :classes], axis=1)


def dense(features: int = 5, outputs: int = 3, *, seed: int = 0, **options: Any) -> keras.Model:
    """Build a model of one Dense layer, which takes `options`."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((features,)), keras.layers.Dense(outputs, **options)])


def cross_entropy() -> keras.losses.Loss:
    """Return the loss of integer labels and logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compute_in(dtype: str) -> None:
    """Let layers that are built from now on, in this thread, have variables and outputs of `dtype`."""
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


def run_info(**changes: Any) -> RunInfo:
    """Return the facts of a run of two ranks, 10 epochs of 23 steps, with `changes`."""
    facts = {
        "recipe": "digits",
        "backend": "horovod",
        "world_size": 2,
        "launcher": "horovodrun",
        "controller": "mpi",
        "global_batch": 64,
        "per_replica_batch": 32,
        "total_steps": 230,
        "steps_per_epoch": 23,
        "parameters": 21418,
    }
    return RunInfo(**(facts | changes))
