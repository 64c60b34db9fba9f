"""DistributedOptimizer with the arguments of `horovod.tensorflow`, `horovod.tensorflow.keras` and `horovod.keras`.

As in Horovod, a wrapped Keras optimizer is an instance of a subclass of the original class: a model saved with it loads
without Horovod. Unlike Horovod's, which is made anew of the configuration, it has the attributes of the original.
"""

from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.distribution import Distribution, distribution_of
from hvdtrain.horovod.flavour import keras, optimizers, refuse_other_keras
from hvdtrain.horovod.names import Adasum, Average, Compression, global_process_set
from hvdtrain.horovod.tape import horovod_exchange, variables_of
from hvdtrain.horovod.v1.optimizer import session_optimizer


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
    options = {**locals()}
    plain, use_locking = options.pop("optimizer"), options.pop("use_locking")
    if isinstance(plain, tf.compat.v1.train.Optimizer):
        return session_optimizer(plain, use_locking=use_locking, **options)
    if op == Adasum:
        raise ConfigError(
            "op == Adasum is not supported yet with Keras: use hvd.DistributedGradientTape(tape, op=hvd.Adasum)."
        )
    return keras_optimizer(plain, **options)


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
    """Return an optimizer of the same class that reduces gradients before it applies them.

    It is the given one in all else: the two share learning rate, count of steps, slots, and what a subclass of the
    user's has. Works in `model.fit` and in custom loops through `apply` and `apply_gradients`, compiled or not. A
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
    options = {**locals()}
    plain, name = options.pop("optimizer"), options.pop("name") or f"Distributed{type(optimizer).__name__}"
    passes, averages = options.pop("backward_passes_per_step"), options.pop("average_aggregated_gradients")
    return _wrapped(plain, Distribution(horovod_exchange(name, **options), passes, averages))


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
    options = {**locals()}
    local = variables_of(options.pop("local_layers"))
    wrapped = keras_optimizer(**options)
    wrapped.distribution.exchange.keep_local(local)
    return wrapped


def _wrapped(optimizer: Any, distribution: Distribution) -> Any:
    """Return an optimizer with the attributes of `optimizer`, of a subclass of its class that reduces gradients first.

    A configuration does not hold all of them: variables without weight decay, attributes of a user's subclass.

    Raises:
        ConfigError: not an optimizer of this process's Keras, or one that reduces already.
    """
    _check_optimizer(optimizer)
    kind = optimizer.__class__
    said = {"__module__": kind.__module__, "__doc__": kind.__doc__, "distribution": distribution}
    wrapped: Any = type(kind.__name__, (optimizers.Distributed, kind), {**said, **optimizers.names_of(kind)})
    _register_alike(wrapped, kind)
    twin = object.__new__(wrapped)
    object.__setattr__(twin, "__dict__", vars(optimizer))
    optimizers.reduce_before_loss_scaling()
    return twin


def _register_alike(wrapped: Any, kind: Any) -> None:
    """Register `wrapped` so that Keras saves it under the name of `kind`, and loads `kind` by it."""
    package, registered, name = keras.saving.get_registered_name(kind).rpartition(">")
    if registered:
        for each in (wrapped, kind):  # the last one is what is loaded
            keras.saving.register_keras_serializable(package, name)(each)


def _check_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        raise ConfigError(
            "hvdtrain.horovod.keras wraps optimizers of Keras. Received: tf.compat.v1.train."
            f"{type(optimizer).__name__}. Wrap it with hvdtrain.horovod.DistributedOptimizer."
        )
    if not isinstance(optimizer, optimizers.KINDS):
        refuse_other_keras(optimizer)
        kind = type(optimizer)
        raise ConfigError(
            f"DistributedOptimizer wraps optimizers of Keras. Received: {kind.__module__}.{kind.__name__}."
        )
    if distribution_of(optimizer) is not None:
        raise ConfigError("This optimizer reduces gradients already: pass the one that was wrapped.")
