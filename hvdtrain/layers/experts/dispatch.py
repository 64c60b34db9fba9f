"""Tokens to the experts' buffers, and the experts' outputs back to the tokens.

Both are gathers: no tensor of tokens x experts x capacity is formed, as a product with one-hot masks would.
"""

from typing import Any

import tensorflow as tf

from hvdtrain.layers.experts.routing import Routes


def slots_of(routes: Routes, slots: Any) -> tf.Tensor:
    """Return each token's slot among the buffers of all experts: [tokens, choices], int32; -1 where it is dropped.

    Args:
        routes: where tokens go.
        slots: of each expert's buffer, at least its capacity.
    """
    return tf.where(routes.kept, routes.experts * slots + routes.positions, -1)


def to_experts(tokens: tf.Tensor, places: tf.Tensor, experts: int, slots: Any) -> tf.Tensor:
    """Return the experts' buffers [experts, slots, width]; slots that no token took are zero.

    Args:
        tokens: [tokens, width].
        places: see `slots_of`.
        experts: number of experts.
        slots: of each of them.
    """
    count, choices = tf.shape(tokens)[0], places.shape[1]
    numbers = tf.repeat(tf.range(1, count + 1), choices)
    # One slot more takes what is dropped.
    into = tf.where(places < 0, experts * slots, places)
    taken = tf.scatter_nd(tf.reshape(into, [-1, 1]), numbers, [experts * slots + 1])[:-1]
    rows = tf.gather(tokens, tf.maximum(taken - 1, 0))
    filled = tf.where(taken[:, tf.newaxis] > 0, rows, tf.zeros_like(rows))
    return tf.reshape(filled, [experts, slots, tokens.shape[1]])


def from_experts(outputs: tf.Tensor, places: tf.Tensor, gates: tf.Tensor) -> tf.Tensor:
    """Return the sum of gate x output over each token's choices: [tokens, width]; zero where all are dropped.

    Args:
        outputs: [experts, slots, width].
        places: see `slots_of`.
        gates: [tokens, choices].
    """
    flat = tf.reshape(outputs, [-1, outputs.shape[2]])
    rows = tf.gather(flat, tf.maximum(places, 0))
    gates = tf.cast(gates, rows.dtype)[..., tf.newaxis]
    return tf.reduce_sum(tf.where(places[..., tf.newaxis] < 0, tf.zeros_like(rows), rows * gates), axis=1)
