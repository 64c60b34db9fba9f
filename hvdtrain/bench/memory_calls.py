"""Memory bandwidth as a reference: all ranks add one array to another at the same time."""

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.bench.calls import Floats
from hvdtrain.bench.mpi_calls import MpiCalls
from hvdtrain.runtime.link import Link


def open_engine(link: Link) -> "MemoryCalls":
    """Pin this rank to its cores; MPI provides the barrier."""
    return MemoryCalls(link)


class MemoryCalls(MpiCalls):
    """See `Caller`."""

    def prepared(self, collective: str, values: Floats) -> Callable[[], Any]:
        """See `Caller`."""
        total = np.zeros_like(values)
        return lambda: np.add(total, values, out=total)
