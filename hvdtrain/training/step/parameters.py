"""What the passes of a replica read and take gradients of."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import tensorflow as tf

from hvdtrain.gradients.reduction import Gradient
from hvdtrain.runtime.placement import placement_of
from hvdtrain.training.step.placeholder import counted


class Collected(NamedTuple):
    """A replica's gradients as they are accumulated, one for each trainable variable."""

    gradients: list[Gradient]
    poison: tf.Tensor | None = None
    """[number of gradients]: of each zero, or NaN where this replica's own is not finite; None: `gradients` show it."""


class Pass:
    """Forward and backward pass of one microbatch.

    Args:
        has_samples: whether this replica has samples of its own; else its gradients count as zeros.
        sources: what gradients are taken of.
    """

    def __init__(self, has_samples: tf.Tensor | float, sources: Sequence[tf.Variable]) -> None:
        self._has_samples = has_samples
        self._sources = sources

    def end_forward(self) -> None:
        """Note that the backward pass begins."""

    def collected(self, gradients: Sequence[Gradient]) -> Collected:
        """Return the gradients with respect to `Parameters.sources` as they are accumulated."""
        return Collected(
            [
                gradient if serves_others(variable) else counted(gradient, self._has_samples)
                for variable, gradient in zip(self._sources, gradients, strict=True)
            ]
        )


class Parameters:
    """The model's own variables, whole on every replica; update rules that divide parameters or gradients have others.

    Args:
        trainable: the variables that are trained, by structural path: of the model, or of one of its stages.
    """

    def __init__(self, trainable: Mapping[str, tf.Variable]) -> None:
        self._trainable = trainable

    def sources(self) -> list[tf.Variable]:
        """Return what gradients are taken of, one for each trainable variable."""
        return list(self._trainable.values())

    @contextmanager
    def passes(self, has_samples: tf.Tensor | float) -> Iterator[Pass]:
        """Context around both passes of a microbatch, entered within the compiled step."""
        yield Pass(has_samples, self.sources())


def serves_others(variable: tf.Variable) -> bool:
    """Return whether the samples of other replicas come to this rank for `variable`, as for an expert or a table."""
    placement = placement_of(variable)
    return placement is not None and bool(placement.held_by)
