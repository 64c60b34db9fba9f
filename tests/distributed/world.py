"""What a distributed check is given, and the plain single-process loop that it is compared with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.runtime.session import Session

TIMEOUT_S = 120.0


@dataclass(frozen=True)
class World:
    session: Session
    backend: Backend
    folder: Path
    """A folder of this launch that all ranks see."""

    @property
    def rank(self) -> int:
        return self.backend.index

    @property
    def size(self) -> int:
        return self.backend.size

    @property
    def controller(self) -> str:
        return self.session.environment.controller

    def gather(self, payload: bytes) -> list[bytes]:
        return self.backend.gather_bytes(payload, timeout=TIMEOUT_S)

    def same_everywhere(self, payload: bytes) -> bool:
        return len(set(self.gather(payload))) == 1


def plain_training(
    model: Any, optimizer: Any, loss: Callable[[Any, Any], tf.Tensor], batches: Sequence[tuple[Any, Any]]
) -> list[np.ndarray]:
    """Train on whole batches in this process, with nothing of hvdtrain, and return the weights.

    `loss` returns one value for each sample. Sparse gradients are made dense, which adds up duplicate rows.
    """
    optimizer.build(model.trainable_variables)
    for inputs, targets in batches:
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(loss(targets, model(inputs, training=True)))
        gradients = tape.gradient(mean, [v.value for v in model.trainable_variables])
        optimizer.apply([tf.convert_to_tensor(g) for g in gradients], model.trainable_variables)
    return [np.array(weight) for weight in model.get_weights()]


def relative_error(weights: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Largest difference over all weights, as a share of the largest weight."""
    largest = max(float(np.abs(w).max()) for w in reference)
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, reference, strict=True)) / largest


def moved(weights: Sequence[np.ndarray], start: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, start, strict=True))


def flat_bytes(weights: Sequence[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(w).tobytes() for w in weights)
