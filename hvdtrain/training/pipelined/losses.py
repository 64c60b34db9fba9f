"""Losses of pipeline stages besides the model's: weight penalties and router losses.

A router loss is a mean over a microbatch's tokens and counts as much as the loss of its samples: times the sum of their
weights, which only the last stage knows. So this sum travels back through the stages with the gradients.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.layers.exchanging import exchanging_layers
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.parallel.pipeline.cut import Cut
from hvdtrain.parallel.pipeline.exchange import Spec
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.variables import unwrap

SPEC = Spec((2,), tf.dtypes.float64)
"""Spec of a `LossShare` between two stages."""


class WeightedLoss(NamedTuple):
    """The loss of a microbatch on the last stage; scalars of one dtype."""

    total: tf.Tensor
    """Loss x weight."""
    weight: tf.Tensor
    """Its number of samples, or what the loss was divided by."""
    expected: tf.Tensor
    """Number of samples of the step over all replicas."""


class LossShare(NamedTuple):
    """Weight of a stage's own loss in a microbatch; float64 scalars."""

    weight: tf.Tensor
    """Sum of the weights of the microbatch's loss on this replica."""
    seed: tf.Tensor
    """Upstream gradient of the microbatch's loss."""

    def packed(self) -> tf.Tensor:
        """Pack both into one tensor of `SPEC`."""
        return tf.stack([tf.cast(each, tf.float64) for each in self])


def share_of(packed: tf.Tensor) -> LossShare:
    """Unpack a LossShare."""
    return LossShare(*tf.unstack(packed, num=2))


def adds_losses(cut: Cut, stage: int) -> bool:
    """Return whether a stage's layers add losses in training."""
    layers = (node.operation for node in cut.nodes(stage))
    return any(isinstance(each, MixtureOfExperts) for layer in layers for each in exchanging_layers(layer))


def shared_up_to(cut: Cut, stage: int) -> bool:
    """Return whether a stage up to this one adds weighted losses."""
    return any(adds_losses(cut, number) for number in range(stage + 1))


class Regularization:
    """Weight penalties of a pipeline rank; a tied weight counts on its first rank.

    A penalty does not depend on the samples, so it is added once per step, times the sum of the loss weights.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self._variables = [
            variable
            for variable in stage.trainable_variables
            if variable.regularizer is not None and stage.counts(variable)
        ]

    @property
    def applies(self) -> bool:
        """Whether this rank has penalties."""
        return bool(self._variables)

    def value(self) -> tf.Tensor:
        """Return the sum of this rank's penalties, in float64."""
        each = [tf.cast(variable.regularizer(variable), tf.float64) for variable in self._variables]
        return tf.add_n(each) if each else tf.zeros([], tf.float64)

    def gradients(self, trainable: Mapping[str, tf.Variable], factor: tf.Tensor) -> list[Gradient]:
        """Return the gradients of `factor` (float64) times the penalties; None for variables without one."""
        penalized = {id(unwrap(variable)) for variable in self._variables}
        with tf.GradientTape() as tape:
            penalty = self.value()
        variables = {path: variable for path, variable in trainable.items() if id(variable) in penalized}
        found = dict(
            zip(variables, tape.gradient(penalty, list(variables.values()), output_gradients=factor), strict=True)
        )
        return [found.get(path) for path in trainable]


class MetricsBackend:
    """Backend that also sums over a replica's stages; all but the last (`counts`) contribute zero."""

    def __init__(self, backend: Backend, pipeline: Collectives, *, counts: bool) -> None:
        self._backend = backend
        self._pipeline = pipeline
        self.counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def all_reduce(self, tensor: tf.Tensor, *, name: str, **options: Any) -> tf.Tensor:
        """Sum elementwise over the replicas, then over the stages. Collective."""
        mine = self._backend.all_reduce(tensor, name=name, **options)
        return self._pipeline.all_reduce(mine, name=name)
