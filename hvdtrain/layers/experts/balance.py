"""Losses that keep a router in use of all of its experts, and its logits small."""

import tensorflow as tf


def load_balance_loss(probabilities: tf.Tensor, shares: tf.Tensor) -> tf.Tensor:
    """Return experts x sum over experts of (share of the tokens x mean probability): 1 if both are even.

    Switch (Fedus et al. 2021, equation 4) and GShard. Only the probabilities have a gradient.

    Args:
        probabilities: [tokens, experts].
        shares: [experts], of the tokens whose first choice is each expert. Of all ranks' tokens, the mean of this loss
            over the tokens of all ranks is that of one process with all of them: it is linear in the probabilities.
    """
    mean = tf.reduce_mean(probabilities, axis=0)
    return tf.cast(probabilities.shape[1], mean.dtype) * tf.reduce_sum(tf.stop_gradient(shares) * mean)


def router_z_loss(logits: tf.Tensor) -> tf.Tensor:
    """Return the mean of log(sum(exp(logits)))^2 over tokens (ST-MoE, Zoph et al. 2022, equation 5).

    Args:
        logits: [tokens, experts].
    """
    return tf.reduce_mean(tf.square(tf.reduce_logsumexp(logits, axis=1)))
