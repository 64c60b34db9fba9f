"""Penalties on weights (`kernel_regularizer`): each stage knows those of its own, and the last one the loss."""

from collections.abc import Mapping

import tensorflow as tf

from hvdtrain.gradients.reduction import Gradient
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.variables import unwrap


class Regularization:
    """The penalties on the weights that a rank of a pipeline holds; a tied weight counts on the first rank that has it.

    A penalty does not depend on the samples. So it is added once to a step, by the sum of the weights of its loss.
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
        """Return the gradients of `factor` times the penalties, None for variables without one.

        Args:
            trainable: the variables that are trained, by path.
            factor: a float64 scalar.
        """
        penalized = {id(unwrap(variable)) for variable in self._variables}
        with tf.GradientTape() as tape:
            penalty = self.value()
        variables = {path: variable for path, variable in trainable.items() if id(variable) in penalized}
        found = dict(
            zip(variables, tape.gradient(penalty, list(variables.values()), output_gradients=factor), strict=True)
        )
        return [found.get(path) for path in trainable]
