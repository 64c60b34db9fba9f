"""DistributedOptimizer with the arguments of `horovod.tensorflow`, `horovod.tensorflow.keras` and `horovod.keras`."""

from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import Adasum, Average, Compression, global_process_set
from hvdtrain.horovod.distribution import Distribution
from hvdtrain.horovod.reduction import Reduction, groups_of
from hvdtrain.horovod.tape import variables_of
from hvdtrain.horovod.v1.optimizer import session_optimizer
from hvdtrain.horovod.wrapped import distributed


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap a Keras optimizer as `hvdtrain.horovod.keras.DistributedOptimizer` does, or one of `tf.compat.v1.train`.

    The latter reduces in `compute_gradients`, and so in `minimize`. `use_locking` is for it alone.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return session_optimizer(
            optimizer,
            op,
            process_set,
            name=name,
            use_locking=use_locking,
            device_dense=device_dense,
            device_sparse=device_sparse,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
            backward_passes_per_step=backward_passes_per_step,
            average_aggregated_gradients=average_aggregated_gradients,
            groups=groups_of(num_groups, groups),
            scale_local_gradients=scale_local_gradients,
        )
    if op == Adasum:
        raise ConfigError(
            "op == Adasum is not supported yet with Keras: use hvd.DistributedGradientTape(tape, op=hvd.Adasum)."
        )
    return keras_optimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )


def keras_optimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Return an optimizer of the same class, configuration and state that reduces gradients before it applies them.

    Works in `model.fit` and in custom loops through `apply` and `apply_gradients`, compiled or not. A
    LossScaleOptimizer may be inside or around it. Pass it local gradients: those of a `DistributedGradientTape` would
    be reduced twice.

    Args:
        optimizer: a Keras optimizer.
        name: prefix of the exchange's names; "Distributed" and the optimizer's class if None.
        device_dense: the device on which gradients are reduced.
        device_sparse: the same for sparse gradients, if `device_dense` is empty.
        compression: `Compression.none`, `Compression.fp16` (16 bits on the wire, summed in 32), or a custom class with
            `compress` and `decompress`.
        sparse_as_dense: make sparse gradients dense; otherwise rows are gathered, and rows of one index summed.
        gradient_predivide_factor: divide by it before the sum, and by size / factor after.
        op: Average or Sum.
        backward_passes_per_step: calls whose gradients are summed before one exchange and update.
        average_aggregated_gradients: divide by that number.
        num_groups: deprecated form of `groups`.
        groups: number of groups of gradients that are sent together, or lists of variables.
        process_set: the ranks that reduce; others apply local gradients.
        scale_local_gradients: divide gradients of local variables by the number of ranks.

    Raises:
        ConfigError: options that Horovod refuses, not an optimizer of this process's Keras, or one wrapped already.
    """
    reduction = Reduction(
        role=name or f"Distributed{type(optimizer).__name__}",
        op=op,
        compression=compression,
        groups=groups_of(num_groups, groups),
        sparse_as_dense=sparse_as_dense,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        scale_local=scale_local_gradients,
        device_dense=device_dense or device_sparse,
    )
    return distributed(optimizer, Distribution(reduction, backward_passes_per_step, average_aggregated_gradients))


def partial_keras_optimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer as `DistributedOptimizer` does; gradients of `local_layers`, which are built, stay local."""
    wrapped = keras_optimizer(
        optimizer,
        name=name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    wrapped.distribution.reduction.keep_local(variables_of(local_layers))
    return wrapped
