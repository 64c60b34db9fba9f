"""Gradient tapes with Horovod's arguments, and its options of the exchange."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.gradient_exchange import GradientExchange, groups_of
from hvdtrain.gradients.tape import ReducingTape
from hvdtrain.horovod.flavour import keras, refuse_other_keras
from hvdtrain.horovod.names import Average, Compression, global_process_set, rocm_built
from hvdtrain.state.variables import as_written


def horovod_exchange(
    role: str,
    *,
    device_dense: str,
    device_sparse: str,
    op: int,
    gradient_predivide_factor: float,
    groups: Any,
    num_groups: int = 0,
    **options: Any,
) -> GradientExchange:
    """Return the exchange that Horovod's arguments describe, in which gradients are matched by position.

    `options` are those of `GradientExchange`.

    Raises:
        ConfigError: options that Horovod refuses, too.
    """
    groups = groups_of(num_groups, groups)
    if gradient_predivide_factor != 1.0 and rocm_built():
        raise ConfigError("gradient_predivide_factor not supported yet with ROCm")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ConfigError("gradient_predivide_factor not supported with op != Average")
    if groups is not None and not (isinstance(groups, list) or groups > 0):
        raise ConfigError("groups should be a non-negative integer or a list of list of tf.Variable.")
    return GradientExchange(
        role=role,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        groups=groups,
        device=device_dense or device_sparse,
        by_position=True,
        **options,
    )


@as_written
def DistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    scale_local_gradients: bool = True,
) -> ReducingTape:
    """Wrap a tape, already recorded or for a `with` block, so that `gradient` returns reduced gradients.

    Sources may be Keras or TensorFlow variables. `device_sparse` is ignored: sparse gradients use `device_dense`.
    """
    options = {**locals()}
    return ReducingTape(options.pop("gradtape"), horovod_exchange("DistributedGradientTape", **options))


@as_written
def PartialDistributedGradientTape(
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> ReducingTape:
    """Wrap a tape as `DistributedGradientTape` does; the gradients of `local_layers` stay local."""
    options = {**locals()}
    local = variables_of(options.pop("local_layers"))
    tape: ReducingTape = DistributedGradientTape(**options)
    for variable in local:
        tape.register_local_source(variable)
    return tape


def variables_of(local_layers: Any) -> Iterable[Any]:
    """Return the trainable variables of a layer or of a collection of layers.

    Raises:
        ConfigError: something else was passed.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or [])
    for layer in layers:
        refuse_other_keras(layer)
        if not isinstance(layer, keras.layers.Layer):
            raise ConfigError("All local layers must be of tf.keras.layers.Layer type.")
    return [variable for layer in layers for variable in layer.trainable_weights]
