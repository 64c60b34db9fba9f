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
from hvdtrain.runtime.compiled import outermost_graph

Apply = Callable[[list[Gradient]], Any]


class CallableList(list[Any]):
    """A callable list, for `optimizer.variables()` in scripts from before Keras 3."""

    def __call__(self) -> "CallableList":
        """Return the list itself."""
        return self


def mark_reduced(gradients: list[Gradient]) -> list[Gradient]:
    """Mark `gradients` as reduced, so that a wrapped optimizer applies them as they are, and return them."""
    for gradient in gradients:
        if gradient is not None:
            gradient._hvdtrain_reduced = True
    return gradients


def are_reduced(gradients: Sequence[Gradient]) -> bool:
    """Whether all `gradients` were marked."""
    there = [gradient for gradient in gradients if gradient is not None]
    return bool(there) and all(getattr(gradient, "_hvdtrain_reduced", False) for gradient in there)


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
        self._computed_in: list[Any] | None = None
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

    def note_computed(self) -> None:
        """Note that `compute_gradients` reduces gradients here, which the next `apply_gradients` may get clipped."""
        self._computed_in = [outermost_graph()]

    def has_reduced(self, gradients: Sequence[Gradient]) -> bool:
        """Whether `gradients`, which are about to be applied, are those that were computed and reduced before.

        They bear a mark. One that was clipped since has lost it: an average may be reduced once more, but a sum would
        grow.

        Raises:
            ConfigError: sums without a mark, of which nobody knows whether they come from `compute_gradients`.
        """
        if are_reduced(gradients):
            self._computed_in = None
            return True
        if self._computed_in is None or self.reduction.op != Sum:
            return False
        if self._computed_in != [outermost_graph()]:
            raise ConfigError(
                "With op=Sum, gradients are reduced once: by compute_gradients or by apply_gradients. Received: an "
                "optimizer that has computed gradients elsewhere, and gradients that may be those. Call both in one "
                "tf.function, or both outside, or apply_gradients(..., experimental_aggregate_gradients=False) to "
                "gradients that are reduced."
            )
        self._computed_in = []
        return True

    def step(self, gradients: Sequence[Gradient], variables: Sequence[Any], iterations: Any, apply: Apply) -> None:
        """Reduce `gradients` and `apply` them, or accumulate them until the last pass.

        `iterations` counts every call, as with Horovod: learning-rate schedules advance while gradients accumulate.
        """
        if self.passes == 1:
            apply(self.reduction.reduce(gradients, variables))
            return
        kept, count = self._buffers(variables), self.counter
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

    @property
    def counter(self) -> tf.Variable:
        """The number of calls whose gradients wait for the last one."""
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int32, name="backward_passes")
        return self._count

    def _buffers(self, variables: Sequence[Any]) -> GradientSum:
        if self._sum is None:
            self._sum = GradientSum(variables)
        return self._sum


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return the `Distribution` of `optimizer`, or of one it wraps; None if it does not reduce."""
    while optimizer is not None:
        if isinstance(found := getattr(optimizer, "distribution", None), Distribution):
            return found
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None
