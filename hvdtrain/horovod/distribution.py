"""Reduction and local aggregation of gradients in a wrapped optimizer of either Keras."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.collectives import LINEAR
from hvdtrain.gradients.gradient_exchange import GradientExchange
from hvdtrain.gradients.gradient_sum import GradientSum
from hvdtrain.gradients.reduction import Gradient, scaled
from hvdtrain.runtime.compiled import outermost_graph
from hvdtrain.state.variables import as_written

Apply = Callable[[list[Gradient]], Any]


class CallableList(list[Any]):
    """A callable list, for `optimizer.variables()` in scripts from before Keras 3."""

    def __call__(self) -> "CallableList":
        """Return the list itself."""
        return self


class Distribution:
    """Reduces gradients for a wrapped optimizer, every `passes` calls.

    Args:
        exchange: how gradients are reduced.
        passes: calls whose gradients are summed locally before one exchange.
        average: divide that sum by the number of passes.
    """

    def __init__(self, exchange: GradientExchange, passes: int = 1, average: bool = False) -> None:
        if exchange.op_name not in LINEAR:
            raise ConfigError(
                "op currently only supports Average and Sum; of Adasum in a loop of your own: "
                "hvdtrain.horovod.DistributedGradientTape(tape, op=hvd.Adasum)"
            )
        if passes < 1:
            raise ConfigError(f"backward_passes_per_step must be at least 1. Received: {passes}.")
        self.exchange = exchange
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
        """Return whether `gradients`, which are about to be applied, were reduced when they were computed.

        They bear a mark. One that was clipped since has lost it: an average may be reduced once more, but a sum would
        grow.

        Raises:
            ConfigError: sums without a mark, of which nobody knows whether they come from `compute_gradients`.
        """
        marks = [getattr(gradient, "_hvdtrain_reduced", False) for gradient in gradients if gradient is not None]
        if marks and all(marks):
            self._computed_in = None
            return True
        if self._computed_in is None or self.exchange.op_name != "sum":
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

    def step(self, gradients: Sequence[Gradient], variables: Sequence[Any], apply: Apply) -> None:
        """Reduce `gradients` and `apply` them, or accumulate them until the last pass.

        Passes that only accumulate are no steps of the optimizer: Horovod counts them as such, and so the bias
        correction of Adam and learning-rate schedules are those of other steps.
        """
        if self.passes == 1:
            apply(self.exchange.reduce(gradients, variables))
            return
        self._sum = kept = self._sum or GradientSum(variables)
        count = self.counter
        kept.add(gradients, first=tf.equal(count, 0))

        def whole() -> tf.Tensor:
            reduced = self.exchange.reduce(kept.read(), variables)
            factor = 1.0 / self.passes if self._average else 1.0
            apply([scaled(gradient, factor) for gradient in reduced])
            count.assign(0)
            return tf.constant(True)

        tf.cond(tf.greater_equal(count.assign_add(1), self.passes), whole, lambda: tf.constant(False))

    def forget(self) -> None:
        """Discard accumulated gradients, as all ranks must when the set of ranks has changed."""
        if self._count is not None:
            self._count.assign(0)

    @property
    def counter(self) -> tf.Variable:
        """The number of calls whose gradients wait for the last one."""
        if self._count is None:
            with eager_variables():
                self._count = tf.Variable(0, trainable=False, dtype=tf.int32, name="backward_passes")
        return self._count


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return the `Distribution` of `optimizer`, or of one it wraps; None if it does not reduce."""
    while optimizer is not None:
        if isinstance(found := getattr(optimizer, "distribution", None), Distribution):
            return found
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


class HorovodNames:
    """Mixin of a wrapped optimizer: gradients that are reduced when they are computed, local variables, helpers.

    `apply_gradients` does not reduce again what these methods return.
    """

    distribution: Distribution
    _local_gradients: Callable[..., tuple[Any, Any]]
    """Returns this rank's gradients, and the variables, of a loss, variables, its upstream gradient and a tape."""

    @as_written
    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[tuple[Any, Any]]:
        """Return (reduced gradient, variable) pairs; `loss` is a function, or a value that `tape` recorded.

        With backward_passes_per_step, and within a LossScaleOptimizer, gradients are this rank's still, and reduced
        when they are applied.
        """
        return self._compute_gradients(loss, var_list, None, tape)

    @as_written
    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> list[tuple[Any, Any]]:
        gradients, variables = self._local_gradients(loss, var_list, grad_loss, tape)
        if self.distribution.passes > 1 or self._is_scaled:
            return list(zip(gradients, variables, strict=True))
        self.distribution.note_computed()
        return list(zip(self._allreduce(gradients, variables), variables, strict=True))

    @property
    def _is_scaled(self) -> bool:
        """Whether an optimizer around this one scales the loss, and divides gradients by the scale."""
        return False

    @as_written
    def get_gradients(self, loss: Any, params: Sequence[Any]) -> list[Gradient]:
        """Return the reduced gradients of an optimizer that computes them itself, by a `get_gradients` of its own."""
        own = getattr(super(), "get_gradients", None)
        if own is None:
            raise AttributeError(
                f"{type(self).__name__} has no get_gradients, which belongs to the graphs of TensorFlow 1. Use "
                "compute_gradients(loss, var_list, tape), or minimize."
            )
        gradients = own(loss, params)
        return list(gradients) if self.distribution.passes > 1 else self._allreduce(gradients, params)

    @as_written
    def _allreduce(self, grads: Sequence[Gradient], vars: Sequence[Any]) -> list[Gradient]:
        """Return the reduced gradients of `vars`, marked as such: `apply_gradients` applies them as they are."""
        reduced = self.distribution.exchange.reduce(list(grads), list(vars))
        for gradient in reduced:
            if gradient is not None:
                gradient._hvdtrain_reduced = True
        return reduced

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self.distribution.exchange.keep_local([var])

    @property
    def process_set(self) -> Any:
        """The ranks that reduce."""
        return self.distribution.exchange.process_set

    @property
    def _agg_helper(self) -> Distribution | None:
        """The local aggregation, with a `counter` of passes; None without backward_passes_per_step."""
        return self.distribution if self.distribution.passes > 1 else None
