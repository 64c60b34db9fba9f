"""Accumulation of the gradients of several microbatches on each replica before one exchange."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.backends.select import current_exchange
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.training import CompressionName
from hvdtrain.gradients.collectives import Op
from hvdtrain.gradients.distributed_optimizer import refuse_exchange_of_microbatches
from hvdtrain.gradients.gradient_exchange import GradientExchange, op_of_updates
from hvdtrain.gradients.gradient_sum import GradientSum
from hvdtrain.gradients.reduction import Gradient, weighted
from hvdtrain.state.variables import as_written


class GradientAccumulator:
    """Adds up the gradients of `steps` microbatches and exchanges them once.

    The result is the gradient of one large batch: sum(weight x gradient) / sum(weight) over the microbatches of all
    ranks, whatever the number of microbatches on each. Call `step` eagerly or within a `tf.function`; or, eagerly,
    `if accumulator.add(gradients): optimizer.apply(accumulator.reduce(), variables)`.

    BatchNormalization sees one microbatch at a time: its statistics are those of microbatches.

    Args:
        variables: Keras 3 variables or tf.Variables, in the order of the gradients to come.
        steps: microbatches of a group.
        op: `average` (default), `sum` (over ranks and microbatches, times their weights), or `adasum` (MPI) of the
            ranks' averages.
        compression: `none`, `fp16` or `bf16` on the wire.
        groups: see `DistributedGradientTape`.
        sparse_as_dense: see `DistributedGradientTape`.
        exchange: the replicas; the current session's ranks if None.

    Raises:
        ConfigError: options that exclude one another.
        LaunchError: `hvdtrain.init()` was not called.

    Example::

        accumulator = hvdtrain.GradientAccumulator(model.trainable_variables, steps=4)
        for x, y in dataset:
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True))
            accumulator.step(tape.gradient(value, model.trainable_variables), optimizer)
        accumulator.flush(optimizer)  # an incomplete group
    """

    def __init__(
        self,
        variables: Sequence[Any],
        steps: int,
        *,
        op: Op = "average",
        compression: CompressionName | Any = "none",
        groups: int | Sequence[Sequence[Any]] = 0,
        sparse_as_dense: bool | None = None,
        exchange: Collectives | None = None,
    ) -> None:
        if steps < 1:
            raise ConfigError(f"steps must be at least 1. Received: {steps}.")
        self.variables = list(variables)
        self.steps = steps
        self._sums = op_of_updates(op) == "sum"
        self._exchange = GradientExchange(
            role="accumulated_gradient",  # not that of a tape on the same variables
            op=op,
            compression=compression,
            groups=groups,
            sparse_as_dense=sparse_as_dense,
            collectives=exchange or current_exchange(),
        )
        self._sum = GradientSum(self.variables)
        self.count = tf.Variable(0, trainable=False, dtype=tf.int32, name="microbatches")
        """Microbatches that were added since the last exchange."""
        self._weight = tf.Variable(0.0, trainable=False, name="weight")

    @as_written
    def add(self, gradients: Sequence[Gradient], weight: Any = 1.0) -> tf.Tensor:
        """Add the local gradients of a microbatch; return whether the group is complete.

        Args:
            gradients: one for each variable: tensors, tf.IndexedSlices or None.
            weight: what the microbatch counts: its samples, where they differ and its gradients are means over them.
                Of weight 0 it counts for nothing, also where its gradients are not finite.
        """
        weight = tf.cast(weight, tf.float32)
        first = tf.equal(self.count, 0)
        self._sum.add([weighted(gradient, weight) for gradient in gradients], first=first)
        self._weight.assign(tf.where(first, weight, self._weight + weight))
        return tf.greater_equal(self.count.assign_add(1), self.steps)

    @as_written
    def reduce(self) -> list[Gradient]:
        """Return the reduced gradients of the group, and start the next one. Collective."""
        local, weight = self._sum.read(), self._weight.read_value()
        self.count.assign(0)
        return self._exchange.reduce(local, self.variables, weight=None if self._sums else weight, is_weighted=True)

    @as_written
    def step(self, gradients: Sequence[Gradient], optimizer: Any, weight: Any = 1.0) -> tf.Tensor:
        """Add a microbatch; after the group's last one, reduce and let `optimizer` apply the result. Collective.

        Returns whether it was applied, as a boolean tensor.
        """
        self._build(optimizer)
        return tf.cond(self.add(gradients, weight), lambda: self._apply(optimizer), lambda: tf.constant(False))

    @as_written
    def flush(self, optimizer: Any) -> tf.Tensor:
        """Reduce and apply an incomplete group, at the end of an epoch, by its own weight. Collective.

        Returns whether there was one, as a boolean tensor.
        """
        self._build(optimizer)
        return tf.cond(self.count > 0, lambda: self._apply(optimizer), lambda: tf.constant(False))

    def _build(self, optimizer: Any) -> None:
        """Create the optimizer's variables here: within a branch of a graph they cannot be."""
        refuse_exchange_of_microbatches(optimizer, "GradientAccumulator")
        if not optimizer.built:
            with eager_variables():
                optimizer.build(self.variables)

    def _apply(self, optimizer: Any) -> tf.Tensor:
        optimizer.apply(self.reduce(), self.variables)
        return tf.constant(True)
