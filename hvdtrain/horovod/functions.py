"""Broadcasts of variables and collectives of objects, as `horovod.tensorflow.functions`."""

import io
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import horovod.tensorflow as horovod
import numpy as np
import tensorflow as tf
from horovod.tensorflow import functions as _horovods

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.collectives import allgather, broadcast, broadcast_
from hvdtrain.horovod.distribution import CallableList
from hvdtrain.horovod.names import ProcessSet, global_process_set, rank, size
from hvdtrain.horovod.v1.variables import broadcast_in_session, in_session_graph
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.runtime.compiled import numbered
from hvdtrain.runtime.process_sets import check_exists, collectives_among, index_of_root, is_included
from hvdtrain.state.variables import as_written, path_of, unwrap, warning_of_adapted

__all__ = [
    "ProcessSet",
    "allgather",
    "allgather_object",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "global_process_set",
    "rank",
    "size",
]


@as_written
def broadcast_variables(
    variables: Any, root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Broadcast `variables` from `root_rank` to every rank of `process_set`.

    Keras and TensorFlow variables are matched by position in the list. `inplace` needs no second copy. A list without
    weights, which a model has before it is built, is warned of. Of a model of Keras 3 also what its layers hold beside
    variables is sent.

    Returns:
        None; in a graph of TensorFlow 1, an op that broadcasts when a session runs it.

    Raises:
        ConfigError: outside of tf.function, if the ranks' variables differ in number, shape or dtype; a model within.
    """
    if (model := _model_of_keras_3(variables)) is not None:
        from hvdtrain.state.layer_states import refuse_in_graph

        refuse_in_graph()
        send(model.variables, root_rank, process_set, inplace)
        _warn_without_weights(model.variables)
        send_states(model, root_rank, process_set)
        return None
    given = variables if isinstance(variables, list) else list(variables)
    if in_session_graph():
        return broadcast_in_session([unwrap(variable) for variable in given], root_rank, process_set, inplace)
    with warning_of_adapted(given, FINALIZE, stacklevel=2):
        send(given, root_rank, process_set, inplace)
    _warn_without_weights(given)
    return None


FINALIZE = (
    "Call the layer's finalize_state() after the broadcast, before the step is compiled, or with Keras 3 "
    "hvd.broadcast_variables(model, root_rank=0)."
)


def _model_of_keras_3(thing: Any) -> Any:
    if not any(kind.__module__.split(".")[0] == "keras" for kind in type(thing).__mro__):
        return None
    from hvdtrain.compat.keras import is_layer  # a script of Keras 2 does without Keras 3

    return thing if is_layer(thing) else None


def send_states(model: Any, root_rank: int, process_set: Any = global_process_set, apart: Collection[int] = ()) -> None:
    """Send what layers of Keras 3 hold beside variables, but for layers with a variable `apart`, by id."""
    from hvdtrain.state.layer_states import share_states

    if not is_included(process_set):
        return
    exchange = collectives_among(process_set)
    ranks = _RanksOfSet(process_set, exchange.index)
    share_states(model, ranks, index_of_root(root_rank, exchange), apart)


@dataclass(frozen=True)
class _RanksOfSet:
    process_set: Any
    rank: int

    def gather_bytes(self, payload: bytes, *, timeout: float | None) -> list[bytes]:
        return allgather_object(payload, name="states_of_layers", process_set=self.process_set)


def send(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> None:
    """Broadcast as `broadcast_variables` does, without its warning and without sessions."""
    tensors = [unwrap(variable) for variable in variables]
    if not is_included(process_set):
        return
    exchange = collectives_among(process_set)
    if tf.executing_eagerly():
        check_same_variables(tensors, exchange)
    if not inplace:
        call = numbered("variables")
        by_place = {f"{call}/{place}": tensor for place, tensor in enumerate(tensors)}
        exchange.broadcast(by_place, root=index_of_root(root_rank, exchange))
        return
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        broadcast_([tensor for tensor in tensors if tensor.device == device], root_rank, None, process_set)


def _warn_without_weights(variables: Sequence[Any]) -> None:
    """Warn of a list without weights; an optimizer that was wrapped may have none before its first step."""
    if isinstance(variables, CallableList) or not all("seed_generator" in path_of(each) for each in variables):
        return
    warnings.warn(
        "broadcast_variables received no weights, so the ranks stay different. A model has none before it is built: "
        "call it on a batch first, or broadcast after the first step.",
        stacklevel=3,
    )


def check_same_variables(variables: Sequence[tf.Variable], exchange: AxisCollectives) -> None:
    """Check that every rank has as many variables, of the same shapes and dtypes in the same order.

    Raises:
        ConfigError: on every rank, if they differ; names the ranks, or the first variable that differs.
    """
    if exchange.size == 1:
        return
    own = [zlib.crc32(f"{variable.shape} {variable.dtype.name}".encode()) for variable in variables]
    summaries = gathered([len(own), zlib.crc32(str(own).encode())], exchange)
    if (summaries == summaries[0]).all():
        return
    counts = [int(count) for count, _ in summaries]
    ranks = exchange.group.ranks
    if len(set(counts)) > 1:
        found = ", ".join(f"{count} on rank {rank}" for count, rank in zip(counts, ranks, strict=True))
        raise ConfigError(f"A broadcast needs the same variables on every rank. Received: {found}. {_ADVICE}")
    place = int((gathered(own, exchange) != own).any(axis=0).argmax())
    variable = variables[place]
    raise ConfigError(
        "A broadcast needs variables of the same shapes and dtypes, in the same order, on every rank. Received: as "
        f"number {place}, {path_of(variable)} of shape {tuple(variable.shape)} and {variable.dtype.name} on rank "
        f"{ranks[exchange.index]}, and another on another rank. {_ADVICE}"
    )


_ADVICE = (
    "Build model and optimizer on every rank first: call the model on a batch, and optimizer.build(variables) or one "
    "step, or broadcast after the first step."
)


def gathered(values: Sequence[int], exchange: AxisCollectives) -> np.ndarray:
    """Return a row of as many numbers of each rank."""

    def gather(row: tf.Tensor) -> tf.Tensor:
        return exchange.all_gather(row, name="broadcast/agreement")

    own = tf.constant([values], tf.int64)
    # A new graph for each call is meant; TensorFlow would warn about retracing.
    return np.asarray(tf.function(gather, autograph=False).get_concrete_function(own)(own))


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> Any:
    """Return the picklable object of `root_rank` on every rank of `process_set`.

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

    exchange = _exchange_in_session("broadcast_object", session, name, process_set)
    index_of_root(root_rank, collectives_among(process_set))

    def send_object(obj: Any) -> Any:
        is_root = rank() == root_rank
        received = exchange(cloudpickle.dumps(obj) if is_root else b"")
        return obj if is_root else cloudpickle.load(received)

    return send_object


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = global_process_set
) -> list[Any]:
    """Return the objects of all ranks of `process_set`, by rank.

    In a graph of TensorFlow 1 it runs in `session`, or in the default session.
    """
    if tf.executing_eagerly():
        check_exists(process_set)
        return list(horovod.allgather_object(obj, None, name, process_set))
    exchange = _exchange_in_session("allgather_object", session, name or "allgather_object", process_set)
    received = exchange(cloudpickle.dumps(obj))
    return [cloudpickle.load(received) for _ in range(process_set.size())]


def _exchange_in_session(function: str, session: Any, name: str, process_set: Any) -> Callable[[bytes], io.BytesIO]:
    """Return a function that concatenates the ranks' pickles; its op is created here, once.

    They are fed through a placeholder: a constant is an input that TensorFlow's graph optimizer runs the op with, on
    one rank and not on the other.
    """
    session = _session_of(function, session)
    with session.graph.as_default():
        own = tf.compat.v1.placeholder(tf.uint8, [None])
        everything = allgather(own, f"{name}.data", process_set=process_set)
    return lambda data: io.BytesIO(session.run(everything, {own: np.frombuffer(data, np.uint8)}).tobytes())


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


def __getattr__(name: str) -> Any:
    """Return what else Horovod's module has."""
    return getattr(_horovods, name)
