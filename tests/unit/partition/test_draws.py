"""A rank draws the random numbers of its own rows: those of one process, and no more for more ranks."""

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.data.batch import split_bounds
from hvdtrain.partition.kinds import Rows
from hvdtrain.partition.step import open_rows, partition_of
from hvdtrain.partition.tracing import traced

BATCH = np.zeros((26, 5, 3), "float32")


def noise(x: tf.Tensor) -> tf.Tensor:
    return x + tf.random.stateless_normal(tf.shape(x), [1, 2])


def doubled(x: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.random.stateless_uniform(keras.ops.shape(x), [3, 4], dtype=tf.float64), tf.float32)


def dropped(x: tf.Tensor) -> tf.Tensor:
    return keras.ops.add(keras.random.dropout(x + 1.0, 0.4, seed=3), x)


def steps(x: tf.Tensor) -> tf.Tensor:
    times = tf.random.stateless_uniform([tf.shape(x)[0]], [5, 6], 0, 1000, tf.int32)
    return x + tf.cast(times, x.dtype)[:, None, None]


def drawn(function: Any, rank: int, ranks: int) -> tuple[np.ndarray, int]:
    """Return a rank's rows of a function's result, and how many random numbers it draws for them."""
    first, last = split_bounds(len(BATCH), rank, ranks)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        opened = open_rows(x)
        partition = partition_of(SimpleNamespace(index=rank, size=ranks), opened, total=len(BATCH))  # type: ignore[arg-type]
        with traced(partition):
            found = function(partition.mark(opened, Rows()))
        assert isinstance(partition.kind(found), Rows)
        makers = [
            op for op in tf.compat.v1.get_default_graph().get_operations() if op.type.startswith("StatelessRandom")
        ]
        numbers = [tf.size(op.outputs[0]) for op in makers if op.outputs[0].dtype != tf.uint64]
        return found, tf.add_n(numbers)

    found, numbers = tf.function(step, autograph=False)(tf.constant(BATCH[first:last]))
    return found.numpy(), int(numbers)


@pytest.mark.parametrize("function", [noise, doubled, dropped, steps])
def test_ranks_draw_their_rows_alone_to_the_bits_of_one_process(function):
    right, all_numbers = drawn(function, 0, 1)
    assert np.ptp(right) > 0.0
    for ranks in (2, 4, 8):
        found = [drawn(function, rank, ranks) for rank in range(ranks)]
        np.testing.assert_array_equal(np.concatenate([rows for rows, _ in found]), right)
        share = -(-len(BATCH) // ranks) * all_numbers // len(BATCH)
        assert max(numbers for _, numbers in found) <= share + 3, "those of its rows, and of the counter they begin in"
