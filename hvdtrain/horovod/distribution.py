"""What a wrapped optimizer does with gradients before they are applied, whichever Keras it is of."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.gradient_sum import GradientSum
from hvdtrain.gradients.reduction import Gradient, scaled
from hvdtrain.horovod.basics import Average, Sum
from hvdtrain.horovod.reduction import Reduction

Apply = Callable[[list[Gradient]], Any]


class CallableList(list[Any]):
    """A list that may be called, as in `optimizer.variables()` of scripts that were written before Keras 3."""

    def __call__(self) -> "CallableList":
        """Return the list itself."""
        return self


class Reduced(list[tuple[Any, Any]]):
    """Pairs of gradients and variables whose gradients are those of all ranks."""


class Distribution:
    """What a wrapped optimizer does before it applies gradients.

    Args:
        reduction: how gradients are reduced.
        passes: calls whose gradients are added up, on their rank, before one exchange.
        average: divide the sum over the passes by their number.
    """

    def __init__(self, reduction: Reduction, passes: int = 1, average: bool = False) -> None:
        if reduction.op not in (Average, Sum):
            raise ConfigError("op currently only supports Average and Sum")
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step must be at least 1. Received: {passes}.")
        self.reduction = reduction
        self.passes = passes
        self._average = average
        self._sum: GradientSum | None = None
        self._count: tf.Variable | None = None
        self.is_done = False
        """Whether the gradients to come are reduced already."""

    @contextmanager
    def done(self) -> Iterator[None]:
        """Take the gradients that come meanwhile for reduced ones."""
        before, self.is_done = self.is_done, True
        try:
            yield
        finally:
            self.is_done = before

    def step(self, gradients: Sequence[Gradient], variables: Sequence[Any], iterations: Any, apply: Apply) -> None:
        """Reduce `gradients` and `apply` them, or keep them until there are enough.

        `iterations` counts every call, as with Horovod: schedules of learning rates go on while gradients are kept.
        """
        if self.passes == 1:
            apply(self.reduction.reduce(gradients, variables))
            return
        kept, count = self._buffers(variables)
        kept.add(gradients, first=tf.equal(count, 0))

        def whole() -> tf.Tensor:
            reduced = self.reduction.reduce(kept.read(), variables)
            factor = 1.0 / self.passes if self._average else 1.0
            apply([scaled(gradient, factor) for gradient in reduced])
            count.assign(0)
            return tf.constant(True)

        def part() -> tf.Tensor:
            iterations.assign_add(1)
            return tf.constant(False)

        tf.cond(tf.greater_equal(count.assign_add(1), self.passes), whole, part)

    def forget(self) -> None:
        """Begin anew with the passes of a step, as all ranks must after one of them has left or come."""
        if self._count is not None:
            self._count.assign(0)

    def _buffers(self, variables: Sequence[Any]) -> tuple[GradientSum, tf.Variable]:
        if self._sum is None or self._count is None:
            self._sum = GradientSum(variables)
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int32, name="backward_passes")
        return self._sum, self._count


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return what `optimizer`, or one that it holds, does before it applies gradients; None if it does not reduce."""
    while optimizer is not None:
        if isinstance(found := getattr(optimizer, "distribution", None), Distribution):
            return found
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights, within whatever wraps it."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer
