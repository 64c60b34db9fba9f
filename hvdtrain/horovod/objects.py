"""Collectives of Python objects."""

from collections.abc import Callable
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import global_process_set


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return the object of `root_rank` on every rank of `process_set`; it must be picklable."""
    _check_eager("broadcast_object", session)
    return horovod.broadcast_object(obj, root_rank, None, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that broadcasts its argument."""
    _check_eager("broadcast_object_fn", session)
    return lambda obj: broadcast_object(obj, root_rank, None, name or "broadcast_object_fn", process_set)


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Return the objects of all ranks of `process_set`, by rank."""
    _check_eager("allgather_object", session)
    return list(horovod.allgather_object(obj, None, name, process_set))


def _check_eager(function: str, session: Any) -> None:
    """Refuse usage from TensorFlow 1.

    Raises:
        ConfigError: a session was passed, or it is called inside tf.function.
    """
    if session is not None:
        raise ConfigError(f"{function}: TensorFlow 2 has no sessions. Leave session out.")
    if not tf.executing_eagerly():
        raise ConfigError(f"{function} exchanges Python objects: call it outside of tf.function.")
