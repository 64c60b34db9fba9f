"""Timing of one engine's collectives, on every rank of a launch."""

import itertools
import json
import os
import re
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdtrain.bench.collectives import ADD, series_name
from hvdtrain.bench.timing import process_settings
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import gather
from hvdtrain.runtime.devices import place_process
from hvdtrain.runtime.link import Link
from hvdtrain.runtime.session import open_session
from hvdtrain.runtime.startup import import_tensorflow

TIMEOUT_S = 600.0
PLACING_S = 120.0
GROUP = 1001
"""TensorFlow's group key of all ranks; the strategy's own keys begin at 1."""
FIRST_INSTANCE = 100_001
Floats = npt.NDArray[np.float32]


class Unavailable(RuntimeError):
    """The engine lacks a collective; the message says why."""


@dataclass(frozen=True)
class Caller:
    """An engine in one process."""

    prepared: Callable[[str, Floats], Callable[[], Any]]
    """Returns a function that calls a collective on an array; its result converts to one. Raises `Unavailable`."""
    meet: Callable[[], Any]
    """Barrier: returns on all ranks within microseconds of one another."""
    close: Callable[[], Any]
    """Shuts down, together with the other ranks."""
    settings: dict[str, str]
    """Settings in effect, for the report."""


def measure(
    caller: Caller, link: Link, collectives: Sequence[str], sizes: Sequence[int]
) -> tuple[dict[str, float], dict[str, str]]:
    """Return milliseconds per call on the slowest rank, and why collectives are missing. Collective."""
    rank, ranks = link.environment.rank, link.environment.size
    times: dict[str, float] = {}
    unavailable: dict[str, str] = {}
    for collective in collectives:
        for size in sizes:
            try:
                call = caller.prepared(collective, input_of(collective, size, rank, ranks))
            except Unavailable as error:
                unavailable[collective] = str(error)
                break
            _check(collective, size, ranks, call())
            times[series_name(collective, size)] = _timed(caller, call, calls(size))
            del call
    by_rank = gather(link.control, times, timeout=TIMEOUT_S)
    return {name: max(each[name] for each in by_rank) for name in times}, unavailable


def input_of(collective: str, size: int, rank: int, ranks: int) -> Floats:
    """Return the input of `rank` for a collective of `size` bytes: all elements are rank + 1.

    Sizes are rounded down to divide among the ranks.
    """
    elements = size // 4 // ranks
    return np.full(elements if collective == "allgather" else elements * ranks, rank + 1, np.float32)


def expected(collective: str, size: int, ranks: int) -> Floats:
    """Return the expected result on every rank."""
    elements, total = size // 4 // ranks, ranks * (ranks + 1) / 2
    if collective in ("allgather", "alltoall"):
        return np.repeat(np.arange(1, ranks + 1, dtype=np.float32), elements)
    if collective == "broadcast":
        return np.ones(elements * ranks, np.float32)
    return np.full(elements if collective == "reducescatter" else elements * ranks, total, np.float32)


def calls(size: int) -> int:
    """Return the number of calls per measurement: 256 MB together, between 5 and 100 calls."""
    return max(5, min(100, 256_000_000 // size))


def _timed(caller: Caller, call: Callable[[], Any], count: int) -> float:
    call()
    caller.meet()
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    # Not the mean: a call that first allocates memory from the system costs as much as many others.
    return 1000.0 * statistics.median(times)


def _check(collective: str, size: int, ranks: int, result: Any) -> None:
    if collective == ADD:
        return
    found, right = np.asarray(result), expected(collective, size, ranks)
    if not np.array_equal(found, right):
        raise RuntimeError(f"{collective} of {size} bytes came out wrong: {found[:3]} in place of {right[:3]}")


def horovod(link: Link) -> Caller:
    """Return Horovod's own functions, called eagerly with hvdtrain's settings of the exchange."""
    session = open_session(link, RuntimeConfig(backend="horovod"))
    import horovod.tensorflow as hvd
    import tensorflow as tf

    one = tf.ones([1])

    def prepared(collective: str, values: Floats) -> Callable[[], Any]:
        tensor = tf.constant(values)
        known: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: hvd.allreduce(tensor, op=hvd.Sum),
            "allgather": lambda: hvd.allgather(tensor),
            "reducescatter": lambda: hvd.reducescatter(tensor, op=hvd.Sum),
            "alltoall": lambda: hvd.alltoall(tensor),
            "broadcast": lambda: hvd.broadcast(tensor, 0),
        }
        return known[collective]

    settings = process_settings(session.plan.threads)
    return Caller(prepared, lambda: hvd.allreduce(one, op=hvd.Sum), hvd.shutdown, settings)


def mpi(link: Link) -> Caller:
    """Return MPI's collectives by mpi4py on NumPy arrays; the control channel has initialized MPI already."""
    from mpi4py import MPI

    plan = place_process(link.control, link.environment, RuntimeConfig(), timeout=PLACING_S)
    world = MPI.COMM_WORLD.Dup()

    def prepared(collective: str, values: Floats) -> Callable[[], Any]:
        ranks = world.Get_size()
        length = {"allgather": len(values) * ranks, "reducescatter": len(values) // ranks}.get(collective, len(values))
        result = values if collective == "broadcast" else np.empty(length, np.float32)
        known: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: world.Allreduce(values, result),
            "allgather": lambda: world.Allgather(values, result),
            "reducescatter": lambda: world.Reduce_scatter_block(values, result),
            "alltoall": lambda: world.Alltoall(values, result),
            "broadcast": lambda: world.Bcast(values, 0),
        }
        call = known[collective]

        def run() -> Floats:
            call()
            return result

        return run

    return Caller(prepared, world.Barrier, world.Free, process_settings(plan.threads))


def memory(link: Link) -> Caller:
    """Return the bandwidth of memory as a reference: all ranks add one array to another at the same time."""

    def prepared(collective: str, values: Floats) -> Callable[[], Any]:
        total = np.zeros_like(values)
        return lambda: np.add(total, values, out=total)

    return replace(mpi(link), prepared=prepared)


def tensorflow(link: Link) -> Caller:
    """Return TensorFlow's ring collectives over gRPC, as MultiWorkerMirroredStrategy calls them."""
    plan = place_process(link.control, link.environment, RuntimeConfig(), timeout=PLACING_S)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        workers = gather(link.control, f"127.0.0.1:{probe.getsockname()[1]}", timeout=PLACING_S)
    rank, size = link.environment.rank, link.environment.size
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
    import_tensorflow()
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(plan.threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, plan.threads))
    ring = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=ring)
    ops, instances = tf.raw_ops, itertools.count(FIRST_INSTANCE)

    def compiled(collective: str, tensor: Any) -> Callable[[], Any]:
        common = {
            "group_size": tf.constant(size),
            "group_key": tf.constant(GROUP),
            "instance_key": tf.constant(next(instances)),
            "communication_hint": "ring",
            "timeout_seconds": 60.0,
        }
        ordered = {**common, "ordering_token": []}
        sums = {"merge_op": "Add", "final_op": "Id"}

        def to_all(x: Any) -> Any:
            """Send row i to rank i; there must be one row per rank."""
            return tf.reshape(ops.CollectiveAllToAllV2(input=tf.reshape(x, [size, -1]), **ordered), [-1])

        def broadcast(x: Any) -> Any:
            if rank == 0:
                return ops.CollectiveBcastSendV2(input=x, **common)
            return ops.CollectiveBcastRecvV2(shape=tf.shape(x), T=x.dtype, **common)

        known: dict[str, Callable[[Any], Any]] = {
            "allreduce": lambda x: ops.CollectiveReduceV2(input=x, **ordered, **sums),
            "allgather": lambda x: ops.CollectiveGatherV2(input=x, **ordered),
            "reducescatter": lambda x: ops.CollectiveReduceScatterV2(input=x, **ordered, **sums),
            "alltoall": to_all,
            "broadcast": broadcast,
        }
        function = tf.function(known[collective], autograph=False).get_concrete_function(tensor)
        return lambda: function(tensor)

    def prepared(collective: str, values: Floats) -> Callable[[], Any]:
        call = compiled(collective, tf.constant(values))
        try:
            call()
        except tf.errors.OpError as error:
            raise Unavailable(re.sub(r"^{{.*?}} ", "", str(error.message).splitlines()[0])) from error
        return call

    meet = compiled("allreduce", tf.ones([1]))
    # The strategy holds the servers, which end with their processes.
    return Caller(prepared, meet, lambda: strategy, process_settings(plan.threads))
