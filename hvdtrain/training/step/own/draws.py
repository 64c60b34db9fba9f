"""Draws without a seed of their own in a model's step: another sequence on every replica."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.training.step.own.replaced import replaced_in_this_thread

_APART = 7919
"""Distance of two replicas' seeds."""


@contextmanager
def draws_of(replica: int) -> Iterator[None]:
    """Offset the global seeds of TensorFlow and Keras by the replica, for what this thread traces inside the context.

    They are the same on every rank, which would give all of them the same noise for different samples. Those of
    `keras.random.SeedGenerator`s that a model holds are set in `TrainState.seed_generators`.
    """
    graph = tf.compat.v1.get_default_graph()
    seed, following = graph.seed, keras.random.SeedGenerator.next

    def offset(generator: Any, ordered: bool = True) -> Any:
        drawn = following(generator, ordered)
        # Keras asks for unordered seeds where a draw has none of its own.
        return drawn if ordered else drawn + tf.cast(replica * _APART, drawn.dtype)

    graph.seed = None if seed is None else seed + replica * _APART
    try:
        with replaced_in_this_thread(keras.random.SeedGenerator, "next", offset):
            yield
    finally:
        graph.seed = seed
