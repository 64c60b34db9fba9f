"""Reduction and local aggregation of gradients in a wrapped optimizer, for either Keras."""

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
    """A callable list, for `optimizer.variables()` in scripts from before Keras 3."""

    def __call__(self) -> "CallableList":
        """Return the list itself."""
        return self


class Reduced(list[tuple[Any, Any]]):
    """(gradient, variable) pairs with gradients already reduced."""


class Distribution:
    """Reduces gradients for a wrapped optimizer, every `passes` calls.

    Args:
        reduction: how gradients are reduced.
        passes: calls whose gradients are summed locally before one exchange.
        average: divide that sum by the number of passes.
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
        """Treat gradients as already reduced inside this context."""
        before, self.is_done = self.is_done, True
        try:
            yield
        finally:
            self.is_done = before

    def step(self, gradients: Sequence[Gradient], variables: Sequence[Any], iterations: Any, apply: Apply) -> None:
        """Reduce `gradients` and `apply` them, or accumulate them until the last pass.

        `iterations` counts every call, as with Horovod: learning-rate schedules advance while gradients accumulate.
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
        """Discard accumulated gradients, as all ranks must when the set of ranks has changed."""
        if self._count is not None:
            self._count.assign(0)

    def _buffers(self, variables: Sequence[Any]) -> tuple[GradientSum, tf.Variable]:
        if self._sum is None or self._count is None:
            self._sum = GradientSum(variables)
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int32, name="backward_passes")
        return self._sum, self._count


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return the `Distribution` of `optimizer`, or of one it wraps; None if it does not reduce."""
    while optimizer is not None:
        if isinstance(found := getattr(optimizer, "distribution", None), Distribution):
            return found
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside any wrappers."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer
