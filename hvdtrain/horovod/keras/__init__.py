"""`import hvdtrain.horovod.keras as hvd` for `horovod.tensorflow.keras`, and for `horovod.keras`.

The signatures are those of `horovod.tensorflow.keras` 0.28.1; `horovod.keras` adds Adasum and
PartialDistributedOptimizer.
"""

import inspect
import os
import types
from collections.abc import Sequence
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod import basics, collectives
from hvdtrain.horovod.basics import *  # noqa: F403
from hvdtrain.horovod.distribution import distribution_of
from hvdtrain.horovod.flavour import IS_LEGACY, keras, optimizers
from hvdtrain.horovod.keras import callbacks, elastic
from hvdtrain.horovod.names import Average, Compression
from hvdtrain.horovod.optimizer import keras_optimizer as DistributedOptimizer
from hvdtrain.horovod.optimizer import partial_keras_optimizer as PartialDistributedOptimizer
from hvdtrain.horovod.v1.variables import broadcast_global_variables

_OF_TENSORFLOW = {
    *("Max", "Min", "Product", "check_extension", "check_num_rank_power_of_2", "gpu_available", "is_homogeneous"),
    *("handle_average_backwards_compatibility", "join", "local_rank_op", "local_size_op", "process_set_included_op"),
    *("rank_op", "refs_to_vars", "size_op", "split_list", "vars_to_refs"),
}
"""Names of `horovod.tensorflow` that `horovod.keras` does not have."""
__all__ = [
    *(name for name in basics.__all__ if name not in _OF_TENSORFLOW),
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "elastic",
    "load_model",
    "reducescatter",
]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a value over all ranks; the average by default."""
    # Not of locals(): autograph adds some.
    return collectives.allreduce(
        value,
        name=name,
        average=average,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        op=op,
        compression=compression,
    )


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the ranks' values along dim 0."""
    return collectives.allgather(value, name)


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return the value of `root_rank`."""
    return collectives.broadcast(value, root_rank, name)


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduce a value over all ranks and return this rank's shard along dim 0."""
    return collectives.reducescatter(value, op=op, name=name)


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[Any] | None = None,
    custom_objects: dict[str, Any] | None = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model whose optimizer, with its state, is wrapped in DistributedOptimizer.

    Args:
        filepath: a saved Keras model (`.keras`, `.h5`, with tf_keras also a SavedModel), or an open h5py.File.
        custom_optimizers: custom optimizer classes.
        custom_objects: further custom classes and functions, by name. A function may return a wrapped optimizer:
            `{"Mine": lambda **config: hvd.DistributedOptimizer(Mine(**config))}`.
        compression: see `DistributedOptimizer`.
        legacy_opts: whether the optimizer is one of `tf.keras.optimizers.legacy`, which Keras 3 does not have. With
            tf_keras the file records it.

    Raises:
        ConfigError: `legacy_opts=True` with Keras 3.
    """
    if legacy_opts and not IS_LEGACY:
        raise ConfigError(
            "Keras 3 has no tf.keras.optimizers.legacy. Leave legacy_opts out: a model that was saved with one of "
            "them is loaded with the optimizer of the same name."
        )
    path = filepath if isinstance(filepath, str | os.PathLike) else filepath.filename
    own = {kind.__name__: kind for kind in custom_optimizers or ()}
    given = {name: _as_class(name, made) for name, made in (custom_objects or {}).items()}
    model = keras.models.load_model(path, custom_objects={**own, **given})
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and distribution_of(optimizer) is None:
        loaded = optimizers.completed(optimizer, model.trainable_variables, path)
        model.optimizer = DistributedOptimizer(loaded, compression=compression)
    return model


def _as_class(name: str, made: Any) -> Any:
    """Return a class whose `from_config` calls `made`, if that is a function of a configuration; otherwise `made`.

    Keras 3 makes optimizers of classes only, and takes a function for the optimizer itself.
    """
    if IS_LEGACY or not isinstance(made, types.FunctionType):
        return made
    # A loss or an activation takes tensors.
    takes = [one.kind for one in inspect.signature(made).parameters.values()]
    if takes != [inspect.Parameter.VAR_KEYWORD]:
        return made
    return type(name, (), {"from_config": classmethod(lambda kind, config: made(**config))})
