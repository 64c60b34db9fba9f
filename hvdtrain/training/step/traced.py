"""What holds while a model's step is traced: functions are traced anew, seeds are a replica's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.seams import FUNCTION, SEEDS
from hvdtrain.compat.tensorflow import copied_function


@contextmanager
def traced_anew() -> Iterator[None]:
    """Trace every `tf.function` that this thread calls inside the context anew.

    A graph from before holds the original functions, and one that is made inside the context the replacements.
    """
    kind = type(tf.function(_nothing))
    original = FUNCTION.active(kind)
    copies: dict[int, tuple[Any, Any]] = {}

    def call(function: Any, *args: Any, **options: Any) -> Any:
        _, copied = copies.setdefault(id(function), (function, copied_function(function)))
        return original(copied, *args, **options)

    with FUNCTION.replaced(kind, call):
        yield


def _nothing() -> None:
    pass


_APART = 7919
"""Distance between the seeds of two replicas."""


@contextmanager
def offset_seeds(replica: int) -> Iterator[None]:
    """Offset TensorFlow's and Keras' seeds by the replica, in this thread.

    The seeds are the same on every rank, which would give all of them the same noise for different samples. A model's
    own `keras.random.SeedGenerator`s are set in `TrainState.seed_generators`.
    """
    graph = tf.compat.v1.get_default_graph()
    seed, following = graph.seed, keras.random.SeedGenerator.next

    def offset(generator: Any, ordered: bool = True) -> Any:
        drawn = following(generator, ordered)
        # Keras requests unordered seeds for random ops without their own.
        return drawn if ordered else drawn + tf.cast(replica * _APART, drawn.dtype)

    graph.seed = None if seed is None else seed + replica * _APART
    try:
        with SEEDS.replaced(keras.random.SeedGenerator, offset):
            yield
    finally:
        graph.seed = seed
