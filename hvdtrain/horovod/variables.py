"""Broadcasting of variables."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.horovod.basics import global_process_set
from hvdtrain.horovod.collectives import broadcast_
from hvdtrain.horovod.distribution import CallableList
from hvdtrain.horovod.exchange import exchange_among, is_included, place_among
from hvdtrain.horovod.same_variables import check_same_variables
from hvdtrain.horovod.v1.graphs import in_session_graph
from hvdtrain.horovod.v1.variables import broadcast_in_session
from hvdtrain.runtime.compiled import numbered
from hvdtrain.state.variables import as_written, path_of, unwrap


@as_written
def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> Any:
    """Broadcast `variables` from `root_rank` to every rank of `process_set`.

    Keras and TensorFlow variables are matched by position in the list. `inplace` needs no second copy. A list without
    weights, which a model has before it is built, is warned of.

    Returns:
        None; in a graph of TensorFlow 1, an op that broadcasts when a session runs it.

    Raises:
        ConfigError: outside of tf.function, if the ranks' variables differ in number, shape or dtype.
    """
    given = variables if isinstance(variables, list) else list(variables)
    if in_session_graph():
        return broadcast_in_session([unwrap(variable) for variable in given], root_rank, process_set, inplace)
    send(given, root_rank, process_set, inplace)
    _warn_without_weights(given)
    return None


def send(
    variables: Iterable[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> None:
    """Broadcast as `broadcast_variables` does, without its warning and without sessions."""
    tensors = [unwrap(variable) for variable in variables]
    if not is_included(process_set):
        return
    exchange = exchange_among(process_set)
    if tf.executing_eagerly():
        check_same_variables(tensors, exchange)
    if not inplace:
        call = numbered("variables")
        by_place = {f"{call}/{place}": tensor for place, tensor in enumerate(tensors)}
        exchange.broadcast(by_place, root=place_among(root_rank, exchange))
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
