"""A gradient tape whose gradients are those of all replicas."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.backends.select import current_exchange
from hvdtrain.compat.tensorflow import share_recording, tape_options
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.training import CompressionName
from hvdtrain.gradients.collectives import Op
from hvdtrain.gradients.gradient_exchange import GradientExchange, groups_of, is_variable
from hvdtrain.state.variables import as_written, path_of, unwrap

_NONE = tf.UnconnectedGradients.NONE


class ReducingTape(tf.GradientTape):
    """A `tf.GradientTape` whose `gradient` and `jacobian` are reduced by a `GradientExchange`.

    Sources may be Keras variables, tf.Variables or tensors, in nested structures, eagerly or within a `tf.function`.
    Gradients by tensors stay on their rank: they are those of its own samples, of which other ranks have others.
    """

    def __init__(
        self,
        tape: tf.GradientTape | None,
        exchange: GradientExchange,
        *,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
    ) -> None:
        if tape is None:
            super().__init__(persistent=persistent, watch_accessed_variables=watch_accessed_variables)
        elif not isinstance(tape, tf.GradientTape):
            raise ConfigError(
                f"The first argument of DistributedGradientTape is a tf.GradientTape. Received: {type(tape).__name__}. "
                "Name all others, such as persistent=True."
            )
        elif persistent or not watch_accessed_variables:
            raise ConfigError(
                "persistent and watch_accessed_variables are arguments of a new tape. Received: a tape to wrap. Pass "
                "them to its tf.GradientTape."
            )
        else:
            super().__init__(*tape_options(tape))
            share_recording(self, tape)
        self._exchange = exchange
        self._is_local = False

    def watch(self, tensor: Any) -> None:
        """Record operations on `tensor`: Keras variables, tf.Variables or tensors, in nested structures."""
        super().watch([_watched(each) for each in tf.nest.flatten(tensor)])

    @as_written
    def register_local_source(self, source: Any) -> None:
        """Keep the gradient of `source`, a variable, on its rank."""
        self._exchange.keep_local([source])

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = _NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return d target / d sources, those by variables reduced, in the structure of `sources`. Collective.

        Args:
            target: a tensor, or a nested structure of tensors.
            sources: variables and tensors, in a nested structure. Nothing is reduced of tensors, such as inputs.
            output_gradients: upstream gradients, one for each tensor of `target`.
            unconnected_gradients: `tf.UnconnectedGradients.NONE` or `ZERO`: what a source that `target` does not depend
                on gets. With ZERO, a variable may be used on some ranks only.
            use_generic_names: an argument of Horovod's, which has no effect: names never depend on those of ops.
        """
        options = (output_gradients, unconnected_gradients)
        return self._reduced(super().gradient, target, sources, *options)

    @as_written
    def jacobian(
        self,
        target: Any,
        sources: Any,
        unconnected_gradients: Any = _NONE,
        parallel_iterations: int | None = None,
        experimental_use_pfor: bool = True,
    ) -> Any:
        """Return the Jacobian of `target`, of one shape on all ranks; by variables it is reduced. Collective.

        It has the shape of `target` followed by that of the source. Arguments are those of `tf.GradientTape.jacobian`.
        """
        options = (unconnected_gradients, parallel_iterations, experimental_use_pfor)
        return self._reduced(super().jacobian, target, sources, *options, role="jacobian")

    @as_written
    def batch_jacobian(self, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the Jacobian of each sample's `target` by its `source`, a tensor: nothing is reduced.

        Further arguments are those of `tf.GradientTape.batch_jacobian`.

        Raises:
            ConfigError: `source` is a variable, which holds no samples.
        """
        if is_variable(source):
            raise ConfigError(
                "batch_jacobian differentiates each sample's target by that sample, a tensor. Received: the variable "
                f"{path_of(source)!r}. Call jacobian(target, variable), which is reduced over the ranks."
            )
        return super().batch_jacobian(target, source, *args, **kwargs)

    @as_written
    def get_local_and_global_gradients(
        self, target: Any, sources: Sequence[Any], output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return (source, gradient) pairs of the local sources and tensors, and of the others. Collective."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names=use_generic_names)
        pairs = list(zip(sources, gradients, strict=True))

        def is_shared(source: Any) -> bool:
            return is_variable(source) and not self._exchange.is_local(source)

        return [pair for pair in pairs if not is_shared(pair[0])], [pair for pair in pairs if is_shared(pair[0])]

    def _reduced(self, compute: Callable[..., Any], target: Any, sources: Any, *options: Any, role: str = "") -> Any:
        """Reduce what `compute` returns by variables, but what TensorFlow's Jacobian asks of `gradient` meanwhile."""
        flat = tf.nest.flatten(sources)
        if self._is_local:
            return compute(target, sources, *options)
        self._is_local = True
        try:
            results = list(compute(target, [_watched(source) for source in flat], *options))
        finally:
            self._is_local = False
        variables = {i: source for i, source in enumerate(flat) if is_variable(source)}
        if variables:
            own = [results[i] for i in variables]
            reduced = self._exchange.reduce(own, list(variables.values()), role=role)
            for i, gradient in zip(variables, reduced, strict=True):
                results[i] = gradient
        return tf.nest.pack_sequence_as(sources, results)


class DistributedGradientTape(ReducingTape):
    """A `tf.GradientTape`, or a wrapper of one, whose gradients are reduced over all ranks.

    Sparse gradients stay sparse, with the rows that several ranks touched added up.

    Args:
        tape: a recorded tape to wrap; None: a new one, for a `with` block.
        device_dense: device on which gradients are reduced.
        device_sparse: the same, if `device_dense` is empty.
        compression: `none`, or `fp16` or `bf16` on the wire with sums in 32 bits; Horovod's `Compression.fp16`, or a
            class with `compress` and `decompress`.
        sparse_as_dense: True converts tf.IndexedSlices to dense tensors before the exchange, False gathers their rows;
            None does, step by step, what moves fewer bytes.
        op: `average`, `sum`, `adasum` (MPI only), `min`, `max` or `product`, or one of Horovod's constants.
        gradient_predivide_factor: with `average`, divide by it before the sum and by size / factor after.
        num_groups: deprecated form of `groups`.
        groups: 0 or None sends every gradient as soon as it is computed, small ones together; n sends n groups; lists
            of variables name the groups.
        process_set: some of the ranks, as a process set of Horovod's; others keep their own gradients.
        scale_local_gradients: divide the gradients of local sources by the number of ranks.
        persistent: see `tf.GradientTape`; of a new tape.
        watch_accessed_variables: see `tf.GradientTape`; of a new tape.
        exchange: the replicas; the current session's ranks if None.

    Raises:
        ConfigError: options that exclude one another.
        LaunchError: `hvdtrain.init()` was not called.

    Example::

        with hvdtrain.DistributedGradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)  # averaged over all ranks
        optimizer.apply(gradients, model.trainable_variables)
    """

    def __init__(
        self,
        tape: tf.GradientTape | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: CompressionName | Any = "none",
        sparse_as_dense: bool | None = None,
        op: Op = "average",
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | Sequence[Sequence[Any]] | None = None,
        process_set: Any = None,
        scale_local_gradients: bool = True,
        *,
        persistent: bool = False,
        watch_accessed_variables: bool = True,
        exchange: Collectives | None = None,
    ) -> None:
        reduction = GradientExchange(
            op=op,
            compression=compression,
            groups=groups_of(num_groups, groups),
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            process_set=process_set,
            collectives=exchange or (current_exchange() if process_set is None else None),
            scale_local_gradients=scale_local_gradients,
            device=device_dense or device_sparse,
        )
        super().__init__(tape, reduction, persistent=persistent, watch_accessed_variables=watch_accessed_variables)


def _watched(source: Any) -> Any:
    return unwrap(source) if is_variable(source) else source
