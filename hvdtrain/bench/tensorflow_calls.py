"""TensorFlow's ring collectives over gRPC, as MultiWorkerMirroredStrategy calls them."""

import itertools
import json
import os
import re
import socket
from collections.abc import Callable
from typing import Any

from hvdtrain.bench.calls import Floats, Unavailable
from hvdtrain.bench.timing import process_settings
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.devices import place_process
from hvdtrain.runtime.link import Link
from hvdtrain.runtime.startup import import_tensorflow

GROUP = 1001
"""Group key of all ranks; the strategy's own keys begin at 1."""
FIRST_INSTANCE = 100_001


def open_engine(link: Link) -> "TensorFlowCalls":
    """Start TensorFlow's servers on every rank."""
    return TensorFlowCalls(link)


class TensorFlowCalls:
    """See `Caller`."""

    def __init__(self, link: Link) -> None:
        plan = place_process(link.control, link.environment, RuntimeConfig(), timeout=120.0)
        os.environ["TF_CONFIG"] = _cluster(link)
        import_tensorflow()
        import tensorflow as tf

        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(plan.threads)
        tf.config.threading.set_inter_op_parallelism_threads(max(2, plan.threads))
        ring = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        self._strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
        self._tf = tf
        self._rank, self._size = link.environment.rank, link.environment.size
        self._instances = itertools.count(FIRST_INSTANCE)
        self._meet = self._compiled("allreduce", tf.ones([1]))
        self.settings = process_settings(plan.threads)

    def prepared(self, collective: str, values: Floats) -> Callable[[], Any]:
        """See `Caller`."""
        call = self._compiled(collective, self._tf.constant(values))
        try:
            call()
        except self._tf.errors.OpError as error:
            raise Unavailable(re.sub(r"^{{.*?}} ", "", str(error.message).splitlines()[0])) from error
        return call

    def _compiled(self, collective: str, tensor: Any) -> Callable[[], Any]:
        tf, ops = self._tf, self._tf.raw_ops
        key = next(self._instances)
        common = {
            "group_size": tf.constant(self._size),
            "group_key": tf.constant(GROUP),
            "instance_key": tf.constant(key),
            "communication_hint": "ring",
            "timeout_seconds": 60.0,
        }
        ordered = {**common, "ordering_token": []}
        sums = {"merge_op": "Add", "final_op": "Id"}
        known: dict[str, Callable[[Any], Any]] = {
            "allreduce": lambda x: ops.CollectiveReduceV2(input=x, **ordered, **sums),
            "allgather": lambda x: ops.CollectiveGatherV2(input=x, **ordered),
            "reducescatter": lambda x: ops.CollectiveReduceScatterV2(input=x, **ordered, **sums),
            "alltoall": lambda x: self._to_all(x, ordered),
            "broadcast": lambda x: self._broadcast(x, common),
        }
        compiled = tf.function(known[collective], autograph=False).get_concrete_function(tensor)
        return lambda: compiled(tensor)

    def _broadcast(self, tensor: Any, common: dict[str, Any]) -> Any:
        ops = self._tf.raw_ops
        if self._rank == 0:
            return ops.CollectiveBcastSendV2(input=tensor, **common)
        return ops.CollectiveBcastRecvV2(shape=self._tf.shape(tensor), T=tensor.dtype, **common)

    def _to_all(self, tensor: Any, ordered: dict[str, Any]) -> Any:
        """Send row i to rank i; there must be one row per rank."""
        rows = self._tf.reshape(tensor, [self._size, -1])
        return self._tf.reshape(self._tf.raw_ops.CollectiveAllToAllV2(input=rows, **ordered), [-1])

    def meet(self) -> None:
        """See `Caller`."""
        self._meet()

    def close(self) -> None:
        """See `Caller`: the servers end with their processes."""


def _cluster(link: Link) -> str:
    """Agree on a port per rank, and return the value of TF_CONFIG."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        mine = f"127.0.0.1:{probe.getsockname()[1]}"
        workers = [text.decode() for text in link.control.exchange(mine.encode(), timeout=120.0)]
    task = {"type": "worker", "index": link.environment.rank}
    return json.dumps({"cluster": {"worker": workers}, "task": task})
