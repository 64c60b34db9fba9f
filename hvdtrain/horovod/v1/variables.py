"""Broadcast of variables in graphs that a session runs."""

import zlib
from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as horovod
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.collectives import allgather, broadcast
from hvdtrain.horovod.names import global_process_set
from hvdtrain.runtime.collectives import collective_name
from hvdtrain.runtime.process_sets import is_included


def in_session_graph() -> bool:
    """Return whether ops are being added to a graph of TensorFlow 1, which a session runs later."""
    # Branches of a tf.cond, and functions, are graphs of their own: what surrounds them decides.
    return not tf.compat.v1.executing_eagerly_outside_functions()


class EagerError(ConfigError, RuntimeError):
    """A function for graphs was called eagerly; a RuntimeError, as in Horovod."""


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an op that broadcasts all variables of the default graph from `root_rank`.

    Create it after the optimizer's `minimize`, so that it includes the optimizer's variables.

    Raises:
        EagerError: TensorFlow lists all variables in graphs only.
    """
    if tf.executing_eagerly():
        raise EagerError(
            "broadcast_global_variables is for graphs of TensorFlow 1: eagerly there is no list of all variables. Call "
            f"hvd.broadcast_variables(model.variables + optimizer.variables, root_rank={root_rank}) instead."
        )
    return broadcast_in_session(tf.compat.v1.global_variables(), root_rank)


def broadcast_in_session(
    variables: Sequence[Any], root_rank: int, process_set: Any = global_process_set, inplace: bool = False
) -> tf.Operation:
    """Return an op that broadcasts `variables` when a session runs it.

    Variables are matched by name. The op fails on all ranks if they do not broadcast the same ones.
    """
    if not is_included(process_set):
        return tf.no_op()
    with tf.control_dependencies([_check_agreement(variables, process_set)]):
        if inplace:
            return horovod.broadcast_variables(variables, root_rank, process_set, inplace=True)
        names = [collective_name("broadcast", variable.name) for variable in variables]
        values = [broadcast(v, root_rank, n, True, process_set) for v, n in zip(variables, names, strict=True)]
        return tf.group(*[v.assign(value) for v, value in zip(variables, values, strict=True)])


def _check_agreement(variables: Sequence[Any], process_set: Any) -> tf.Operation:
    """Return an op that fails unless the variables have the same names on all ranks; they would wait for each other."""
    names = "\n".join(sorted(f"{v.name} {v.dtype.base_dtype.name} {v.shape}" for v in variables))
    own = tf.constant([[len(variables), zlib.crc32(names.encode())]], tf.int64)
    rows = allgather(own, "broadcast.variables", True, process_set)
    said = [
        "broadcast_global_variables and broadcast_variables need the same variables on all ranks. Received: these "
        "numbers of variables, and checksums of their names, by rank:",
        rows,
        "Build the same graph on every rank.",
    ]
    return tf.debugging.Assert(tf.reduce_all(tf.equal(rows, rows[:1])), said, summarize=64)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """A session hook that broadcasts all variables from `root_rank` once a session is created or restored.

    For `tf.compat.v1.train.MonitoredTrainingSession(hooks=[...])`.

    Args:
        root_rank: the rank whose values the others receive.
        device: the device to broadcast on.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Add the broadcast to the graph, which is frozen afterwards."""
        if self.bcast_op is None or self.bcast_op.graph != tf.compat.v1.get_default_graph():
            with tf.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the broadcast."""
        session.run(self.bcast_op)
