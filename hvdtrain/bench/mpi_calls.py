"""MPI's collectives by mpi4py on NumPy arrays, without Horovod and TensorFlow."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.bench.calls import Floats
from hvdtrain.bench.timing import process_settings
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.devices import place_process
from hvdtrain.runtime.link import Link


def open_engine(link: Link) -> "MpiCalls":
    """Pin this rank to its cores; the control channel has initialized MPI already."""
    return MpiCalls(link)


class MpiCalls:
    """See `Caller`."""

    def __init__(self, link: Link) -> None:
        from mpi4py import MPI

        plan = place_process(link.control, link.environment, RuntimeConfig(), timeout=120.0)
        self._world = MPI.COMM_WORLD.Dup()
        self.settings = process_settings(plan.threads)

    def prepared(self, collective: str, values: Floats) -> Callable[[], Any]:
        """See `Caller`."""
        world, ranks = self._world, self._world.Get_size()
        length = {"allgather": len(values) * ranks, "reducescatter": len(values) // ranks}.get(collective, len(values))
        result = np.empty(length, np.float32)
        known: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: world.Allreduce(values, result),
            "allgather": lambda: world.Allgather(values, result),
            "reducescatter": lambda: world.Reduce_scatter_block(values, result),
            "alltoall": lambda: world.Alltoall(values, result),
            "broadcast": lambda: world.Bcast(values, 0),
        }
        call, out = known[collective], values if collective == "broadcast" else result

        def run() -> Floats:
            call()
            return out

        return run

    def meet(self) -> None:
        """See `Caller`."""
        self._world.Barrier()

    def close(self) -> None:
        """See `Caller`."""
        self._world.Free()
