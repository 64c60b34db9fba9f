"""Collectives of Python objects, eagerly and in the sessions of TensorFlow 1."""

from collections.abc import Callable
from typing import Any

import cloudpickle
import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod import primitives
from hvdtrain.horovod.basics import global_process_set, rank
from hvdtrain.horovod.exchange import check_exists
from hvdtrain.horovod.primitives import Call


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return the object of `root_rank` on every rank of `process_set`; it must be picklable.

    In a graph of TensorFlow 1 it runs in `session`, or in the default session.
    """
    if not tf.executing_eagerly():
        return broadcast_object_fn(root_rank, session, name or "broadcast_object", process_set)(obj)
    check_exists(process_set)
    return horovod.broadcast_object(obj, root_rank, None, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Callable[[Any], Any]:
    """Return a function that broadcasts its argument; in a graph of TensorFlow 1 its ops are created here, once."""
    name = name or "broadcast_object_fn"
    if tf.executing_eagerly():
        return lambda obj: broadcast_object(obj, root_rank=root_rank, session=None, name=name, process_set=process_set)

    def among(tensor: tf.Tensor, role: str) -> tf.Tensor:
        return primitives.broadcast(tensor, root_rank, Call(f"{name}.{role}", process_set=process_set))

    messages = _SessionMessages("broadcast_object", session, among)

    def broadcast(obj: Any) -> Any:
        is_root = rank() == root_rank
        data = _packed(obj) if is_root else np.zeros(0, np.uint8)
        sizes = messages.exchange_sizes(data)
        data = messages.exchange_data(data if is_root else np.zeros(sizes[0], np.uint8))
        return obj if is_root else cloudpickle.loads(data.tobytes())

    return broadcast


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Return the objects of all ranks of `process_set`, by rank.

    In a graph of TensorFlow 1 it runs in `session`, or in the default session.
    """
    if tf.executing_eagerly():
        check_exists(process_set)
        return list(horovod.allgather_object(obj, None, name, process_set))
    prefix = name or "allgather_object"

    def among(tensor: tf.Tensor, role: str) -> tf.Tensor:
        return primitives.all_gather([tensor], Call(f"{prefix}.{role}", process_set=process_set))[0]

    messages = _SessionMessages("allgather_object", session, among)
    data = _packed(obj)
    sizes, everything = messages.exchange_sizes(data), messages.exchange_data(data)
    return [cloudpickle.loads(each.tobytes()) for each in np.split(everything, np.cumsum(sizes)[:-1])]


class _SessionMessages:
    """The two ops that exchange pickled objects in a session: their sizes first, then their bytes.

    Objects are fed through placeholders: a constant is an input that TensorFlow's graph optimizer runs the op with, on
    one rank and not on the other.
    """

    def __init__(self, function: str, session: Any, among: Callable[[tf.Tensor, str], tf.Tensor]) -> None:
        self._session = _session_of(function, session)
        with self._session.graph.as_default():
            self._size = tf.compat.v1.placeholder(tf.int64, [1])
            self._data = tf.compat.v1.placeholder(tf.uint8, [None])
            self._sizes, self._everything = among(self._size, "size"), among(self._data, "data")

    def exchange_sizes(self, data: np.ndarray) -> np.ndarray:
        """Exchange the number of bytes."""
        return np.asarray(self._session.run(self._sizes, {self._size: [data.size]}))

    def exchange_data(self, data: np.ndarray) -> np.ndarray:
        """Exchange the bytes."""
        return np.asarray(self._session.run(self._everything, {self._data: data}))


def _session_of(function: str, session: Any) -> Any:
    """Return the session to run in.

    Raises:
        ConfigError: called inside tf.function, or in a graph without a session.
    """
    if tf.compat.v1.get_default_graph().building_function:
        raise ConfigError(f"{function} exchanges Python objects: call it outside of tf.function.")
    found = session or tf.compat.v1.get_default_session()
    if found is None:
        raise ConfigError(
            f"{function} needs a session in a graph of TensorFlow 1. Received: session=None, and no default session. "
            "Pass session=…, or call it inside `with tf.compat.v1.Session():`."
        )
    return found


def _packed(obj: Any) -> np.ndarray:
    return np.frombuffer(cloudpickle.dumps(obj), np.uint8)
