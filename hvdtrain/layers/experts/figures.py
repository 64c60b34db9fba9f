"""What layers of experts count of the tokens that they send: how many are dropped, and the load of each expert."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives


class RoutingCounts:
    """Counts of the training steps since the last reset, in variables that belong to no state.

    Args:
        experts: number of experts.
    """

    def __init__(self, experts: int) -> None:
        # In a plain object Keras does not find them: they are no weights, and checkpoints leave them out.
        local: dict[str, Any] = {
            "trainable": False,
            "synchronization": tf.VariableSynchronization.ON_READ,
            "aggregation": tf.VariableAggregation.SUM,
        }
        with tf.init_scope():  # a layer inside another one is built while the outer one is traced
            self.load = tf.Variable(tf.zeros([experts]), name="expert_load", **local)
            """Tokens that chose each expert."""
            self.dropped = tf.Variable(0.0, name="dropped_tokens", **local)
            """Those of them that found no place; a token with two choices may count twice."""

    def add(self, load: tf.Tensor, kept: tf.Tensor, has_samples: Any) -> None:
        """Add up one call.

        Args:
            load: [experts], tokens that chose each expert.
            kept: [tokens, choices], whether they found a place.
            has_samples: 1, or 0 for a placeholder.
        """
        present = tf.cast(has_samples, tf.float32) > 0
        dropped = tf.reduce_sum(tf.cast(tf.logical_not(kept), tf.float32))
        self.load.assign_add(tf.where(present, tf.cast(load, tf.float32), 0.0))
        self.dropped.assign_add(tf.where(present, dropped, 0.0))


def routing_figures(layers: Sequence[Any], replicas: Collectives) -> dict[str, tf.Tensor]:
    """Return what all replicas' `layers` counted since the last call, and set the counts to zero.

    `dropped_tokens` is the number of tokens, times the layers and choices, that an expert had no place for;
    `dropped_share` their share; `expert_load_NAME` [experts] is the load of each expert of the layer NAME, 1 for an
    even one.

    Args:
        layers: those of a model that are built and hold `counts`.
        replicas: the ranks with samples of their own; all of them must call it together.
    """
    if not layers:
        return {}
    own = [tf.concat([layer.counts.load, [layer.counts.dropped]], 0) for layer in layers]
    sizes = [layer.experts + 1 for layer in layers]
    everywhere = tf.split(replicas.all_reduce(tf.concat(own, 0), name="routing_figures"), sizes)
    for layer in layers:
        layer.counts.load.assign(tf.zeros([layer.experts]))
        layer.counts.dropped.assign(0.0)
    dropped = tf.add_n([counts[-1] for counts in everywhere])
    sent = tf.add_n([tf.reduce_sum(counts[:-1]) for counts in everywhere])
    figures = {"dropped_tokens": dropped, "dropped_share": tf.math.divide_no_nan(dropped, sent)}
    for layer, counts in zip(layers, everywhere, strict=True):
        mean = tf.reduce_mean(counts[:-1])
        figures[f"expert_load_{layer.name}"] = tf.math.divide_no_nan(counts[:-1], mean)
    return figures
