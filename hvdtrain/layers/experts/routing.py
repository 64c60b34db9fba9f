"""Which experts a token goes to, and its place in their queues."""

import math
from typing import Any, NamedTuple

import tensorflow as tf


class Routes(NamedTuple):
    """Where each token goes, by its first choice, its second …"""

    experts: tf.Tensor
    """[tokens, choices], int32: the experts that a token chose."""
    gates: tf.Tensor
    """[tokens, choices]: what multiplies their outputs."""
    positions: tf.Tensor
    """[tokens, choices], int32: how many tokens stand before it in the expert's queue."""
    kept: tf.Tensor
    """[tokens, choices], bool: whether it has a place within the expert's capacity; the others are dropped."""


def expert_capacity(tokens: Any, experts: int, top_k: int, factor: float | None) -> Any:
    """Return how many tokens an expert takes: ceil(factor x top_k x tokens / experts), at most all of them.

    As in Switch (Fedus et al. 2021, equation 3) and, for two choices, GShard (Lepikhin et al. 2020).

    Args:
        tokens: their number, an int, or an integer tensor for one too.
        experts: number of experts.
        top_k: choices of each token.
        factor: slots for each token that an even load would fill; None: as many as there are tokens.
    """
    if factor is None:
        return tokens
    share = factor * top_k / experts
    if not tf.is_tensor(tokens):
        return min(tokens, math.ceil(share * tokens))
    return tf.minimum(tokens, tf.cast(tf.math.ceil(share * tf.cast(tokens, tf.float64)), tokens.dtype))


def choose_experts(probabilities: tf.Tensor, top_k: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the `top_k` most probable experts of each token and their gates, both [tokens, top_k].

    The gate of a single choice is its probability (Switch); those of two are normalised to add up to 1 (GShard), so
    that the router learns how much of each there should be.

    Args:
        probabilities: [tokens, experts].
        top_k: 1 or 2.
    """
    gates, experts = tf.math.top_k(probabilities, top_k)
    if top_k > 1:
        gates /= tf.reduce_sum(gates, axis=1, keepdims=True)
    return experts, gates


def queue_positions(chosen: tf.Tensor, experts: int) -> tf.Tensor:
    """Return how many tokens stand before each in the queue of the expert that it chose: [tokens, choices], int32.

    Tokens queue in their order; all first choices stand before the second ones (GShard, algorithm 1).

    Args:
        chosen: [tokens, choices], int32.
        experts: number of experts.
    """
    # TensorFlow complains of integers that it transposes, on most processors.
    in_order = tf.concat(tf.unstack(chosen, axis=1), 0)
    one_hot = tf.one_hot(in_order, experts, dtype=tf.int32)
    before = tf.cumsum(one_hot, exclusive=True)
    positions = tf.reduce_sum(before * one_hot, axis=1)
    return tf.stack(tf.split(positions, chosen.shape[1]), axis=1)


def routes_of(probabilities: tf.Tensor, top_k: int, capacity: Any) -> Routes:
    """Return the routes of all tokens.

    Args:
        probabilities: [tokens, experts] of the router.
        top_k: choices of each token.
        capacity: how many tokens an expert takes.
    """
    experts, gates = choose_experts(probabilities, top_k)
    positions = queue_positions(experts, probabilities.shape[1])
    return Routes(experts, gates, positions, positions < capacity)


def load_of(chosen: tf.Tensor, experts: int) -> tf.Tensor:
    """Return how many tokens chose each expert, dropped ones too: [experts], int32."""
    return tf.math.bincount(tf.reshape(chosen, [-1]), minlength=experts, maxlength=experts, dtype=tf.int32)
