"""Losses that the layers of a stage add to the model's: those of the routers of experts.

Such a loss is a mean over the tokens of a microbatch, and counts as much as the loss of its samples does: times the sum
of their weights, which the last stage alone knows. So that travels back through the stages, along with the gradients.
"""

from typing import NamedTuple

import tensorflow as tf

from hvdtrain.layers.exchanging import exchanging_layers
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.parallel.pipeline.cut import Cut
from hvdtrain.parallel.pipeline.exchange import Spec

SPEC = Spec((2,), tf.dtypes.float64)
"""Of a `LossShare` between two stages."""


class LossShare(NamedTuple):
    """How much a loss that a stage adds counts in a microbatch; float64 scalars."""

    weight: tf.Tensor
    """Sum of the weights of the microbatch's loss on this replica."""
    seed: tf.Tensor
    """With what the backward pass of the microbatch's loss begins."""

    def packed(self) -> tf.Tensor:
        """Return both as one tensor, as `SPEC` says."""
        return tf.stack([tf.cast(each, tf.float64) for each in self])


def share_of(packed: tf.Tensor) -> LossShare:
    """Return what `packed` holds."""
    return LossShare(*tf.unstack(packed, num=2))


def adds_losses(cut: Cut, stage: int) -> bool:
    """Whether layers of a stage add losses in training."""
    layers = (node.operation for node in cut.nodes(stage))
    return any(isinstance(each, MixtureOfExperts) for layer in layers for each in exchanging_layers(layer))


def shared_up_to(cut: Cut, stage: int) -> bool:
    """Whether a stage, or one before it, adds losses: it must know what they count."""
    return any(adds_losses(cut, number) for number in range(stage + 1))
