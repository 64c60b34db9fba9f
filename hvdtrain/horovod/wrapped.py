"""Keras optimizers that are given local gradients and apply those of all ranks, as classes of their own kind.

A wrapped optimizer is an instance of the class that was wrapped, with its attributes, slots and configuration, as
Horovod's is: a model that is saved with it loads without Horovod.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Average, Sum
from hvdtrain.horovod.reduction import Reduction
from hvdtrain.training.accumulation import GradientSum
from hvdtrain.training.reduction import Gradient, scaled
from hvdtrain.training.variables import as_written

Apply = Callable[[list[Gradient]], Any]


class CallableList(list[Any]):
    """A list that may be called, as in `optimizer.variables()` of scripts that were written before Keras 3."""

    def __call__(self) -> "CallableList":
        """Return the list itself."""
        return self


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
        self._passes = passes
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
        if self._passes == 1:
            apply(self.reduction.reduce(gradients, variables))
            return
        kept, count = self._buffers(variables)
        kept.add(gradients, first=tf.equal(count, 0))

        def whole() -> tf.Tensor:
            reduced = self.reduction.reduce(kept.read(), variables)
            factor = 1.0 / self._passes if self._average else 1.0
            apply([scaled(gradient, factor) for gradient in reduced])
            count.assign(0)
            return tf.constant(True)

        def part() -> tf.Tensor:
            iterations.assign_add(1)
            return tf.constant(False)

        tf.cond(tf.greater_equal(count.assign_add(1), self._passes), whole, part)

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


class Distributed:
    """What is put before a Keras optimizer's class: `apply` reduces first."""

    distribution: Distribution
    inner_optimizer: Any
    _iterations: Any

    @as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Reduce `grads` and let the wrapped optimizer apply the result; every rank must call it."""
        gradients, plain = list(grads), super().apply  # type: ignore[misc]
        if self.distribution.is_done or not gradients:
            plain(gradients, trainable_variables)
            return
        variables = built(self, trainable_variables)
        counter = innermost(self)._iterations
        self.distribution.step(gradients, variables, counter, lambda reduced: plain(reduced, variables))

    @as_written
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce and apply pairs of gradients and variables; those of `compute_gradients` are reduced already."""
        pairs = grads_and_vars if isinstance(grads_and_vars, _Reduced) else list(grads_and_vars)
        if not isinstance(pairs, _Reduced):
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
        with self.distribution.done():
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]

    @as_written
    def compute_gradients(self, loss: Any, var_list: Sequence[Any], tape: Any = None) -> list[tuple[Any, Any]]:
        """Return pairs of reduced gradients and variables; `loss` is a function, or a value that `tape` recorded.

        For `apply_gradients`, which does not reduce them again.
        """
        if self.distribution._passes > 1:
            raise ConfigError("compute_gradients reduces at once: with backward_passes_per_step use apply_gradients.")
        tape = tf.GradientTape() if tape is None else tape
        if callable(loss):
            with tape:
                loss = loss()
        gradients = tape.gradient(loss, list(var_list))
        return _Reduced(zip(self.distribution.reduction.reduce(gradients, var_list), var_list, strict=True))

    def register_local_var(self, var: Any) -> None:
        """Leave the gradient of `var` on its rank."""
        self.distribution.reduction.keep_local([var])

    @property
    def variables(self) -> CallableList:
        """The wrapped optimizer's variables."""
        return CallableList(super().variables)  # type: ignore[misc]


class _Reduced(list[tuple[Any, Any]]):
    """Pairs whose gradients are those of all ranks."""


def distributed(optimizer: Any, distribution: Distribution) -> Any:
    """Return an optimizer of the class, configuration and state of `optimizer` that reduces gradients first.

    Raises:
        ConfigError: what was passed is no Keras optimizer, or reduces already.
    """
    _check_optimizer(optimizer)
    kind = optimizer.__class__
    wrapped: Any = type(kind.__name__, (Distributed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})
    _register_alike(wrapped, kind)
    twin = wrapped.from_config(optimizer.get_config())
    twin.distribution = distribution
    if optimizer.built:
        with tf.init_scope():
            twin.build(optimizer._trainable_variables)
        for mine, theirs in zip(twin.variables, optimizer.variables, strict=True):
            mine.assign(theirs)
    _reduce_before_loss_scaling()
    return twin


def distribution_of(optimizer: Any) -> Distribution | None:
    """Return what `optimizer`, or one that it holds, does before it applies gradients; None if it does not reduce."""
    while optimizer is not None:
        if isinstance(optimizer, Distributed):
            return optimizer.distribution
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return None


def innermost(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights, within whatever wraps it."""
    while (inner := getattr(optimizer, "inner_optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def built(optimizer: Any, variables: Sequence[Any] | None) -> list[Any]:
    """Create the slots of `optimizer`, which within a branch of a graph cannot be, and return its variables."""
    if variables is None:
        return list(optimizer._trainable_variables)
    if not optimizer.built:
        with tf.init_scope():
            optimizer.build(list(variables))
    return list(variables)


def _register_alike(wrapped: Any, kind: Any) -> None:
    """Let Keras save `wrapped` under the name that `kind` is registered under, and load `kind` by it."""
    package, registered, name = keras.saving.get_registered_name(kind).rpartition(">")
    if registered:
        for each in (wrapped, kind):  # the last one is what is loaded
            keras.saving.register_keras_serializable(package, name)(each)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ConfigError(
            f"TensorFlow 1's {type(optimizer).__name__} needs sessions. Use an optimizer of keras.optimizers, with "
            "hvd.DistributedOptimizer in model.fit or hvd.DistributedGradientTape in a loop of your own."
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer)
        raise ConfigError(
            f"DistributedOptimizer wraps optimizers of Keras 3. Received: {kind.__module__}.{kind.__name__}."
        )
    if distribution_of(optimizer) is not None:
        raise ConfigError("This optimizer reduces gradients already: pass the one that was wrapped.")


def _reduce_before_loss_scaling() -> None:
    """Let a LossScaleOptimizer around a wrapped optimizer look at reduced gradients.

    Keras puts one around the optimizer in `model.compile` with `mixed_float16`. By itself it would decide rank by rank
    whether gradients are finite, and the ranks that skip a step would leave the others waiting in the exchange.
    """
    kind = keras.optimizers.LossScaleOptimizer
    plain = kind.apply
    if getattr(plain, "reduces_first", False):
        return

    @as_written
    def apply(self: Any, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        inner = getattr(self, "inner_optimizer", None)
        gradients = list(grads)
        if not isinstance(inner, Distributed) or inner.distribution.is_done or not gradients:
            plain(self, gradients, trainable_variables)
            return
        variables = built(self, trainable_variables)

        def apply_reduced(reduced: list[Gradient]) -> None:
            with inner.distribution.done():
                plain(self, reduced, variables)

        inner.distribution.step(gradients, variables, innermost(inner)._iterations, apply_reduced)

    apply.reduces_first = True  # type: ignore[attr-defined]
    kind.apply = apply
