"""Variables that a replica's passes read and differentiate."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, NamedTuple

import tensorflow as tf

from hvdtrain.gradients.reduction import Gradient
from hvdtrain.runtime.placement import placement_of
from hvdtrain.training.step.placeholder import counted


class Collected(NamedTuple):
    """A replica's accumulable gradients, one per trainable variable."""

    gradients: list[Gradient]
    poison: tf.Tensor | None = None
    """[number of gradients]: zero, or NaN if this replica's gradient is not finite; None: see `gradients`."""


class Pass:
    """Forward and backward pass of one microbatch; gradients are zero unless `has_samples`."""

    def __init__(self, has_samples: tf.Tensor | float, sources: Sequence[tf.Variable]) -> None:
        self._has_samples = has_samples
        self._sources = sources

    def end_forward(self) -> None:
        """Mark the start of the backward pass."""

    def collected(self, gradients: Sequence[Gradient]) -> Collected:
        """Return accumulable gradients for the gradients of `Parameters.sources`."""
        return Collected(
            [
                gradient if serves_others(variable) else counted(gradient, self._has_samples)
                for variable, gradient in zip(self._sources, gradients, strict=True)
            ]
        )


class Parameters:
    """A model's or stage's full variables, by path; base for sharded parameters."""

    exchanges_backward: ClassVar[bool] = False
    """Whether gradients of several replicas are added up while they are computed."""

    def __init__(self, trainable: Mapping[str, tf.Variable]) -> None:
        self._trainable = trainable

    def sources(self) -> list[tf.Variable]:
        """Return the variables to differentiate, one per trainable variable."""
        return list(self._trainable.values())

    @contextmanager
    def passes(self, has_samples: tf.Tensor | float) -> Iterator[Pass]:
        """Context around both passes of a microbatch, entered within the compiled step."""
        yield Pass(has_samples, self.sources())


def serves_others(variable: tf.Variable) -> bool:
    """Return whether other replicas' samples use `variable` (expert, sharded table)."""
    placement = placement_of(variable)
    return placement is not None and bool(placement.held_by)
