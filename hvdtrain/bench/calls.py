"""Timing of one engine's collectives, on every rank of a launch. No TensorFlow."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdtrain.bench.bandwidth import ADD, calls
from hvdtrain.runtime.link import Link

TIMEOUT_S = 600.0
Floats = npt.NDArray[np.float32]


class Unavailable(RuntimeError):
    """The engine lacks a collective; the message says why."""


class Caller(Protocol):
    """An engine in one process."""

    settings: dict[str, str]
    """Settings in effect, for the report."""

    def prepared(self, collective: str, values: Floats) -> Callable[[], Any]:
        """Return a function that calls `collective` on `values`; its result converts to an array.

        Raises:
            Unavailable: the engine lacks the collective.
        """

    def meet(self) -> None:
        """Barrier: return on all ranks within microseconds of one another."""

    def close(self) -> None:
        """Shut down, together with the other ranks."""


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


def measure(caller: Caller, link: Link, collectives: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Time each collective at each size, in milliseconds per call on the slowest rank; every rank calls it."""
    rank, ranks = link.environment.rank, link.environment.size
    series, skipped = [], {}
    for collective in collectives:
        for size in sizes:
            try:
                call = caller.prepared(collective, input_of(collective, size, rank, ranks))
            except Unavailable as error:
                skipped[collective] = str(error)
                break
            _check(collective, size, ranks, call())
            series.append({"collective": collective, "bytes": size, "ms": _timed(caller, call, calls(size))})
            del call
    by_rank = link.control.exchange(json.dumps([row["ms"] for row in series]).encode(), timeout=TIMEOUT_S)
    slowest = np.max([json.loads(times) for times in by_rank], axis=0).tolist() if series else []
    rows = [{**row, "ms": ms} for row, ms in zip(series, slowest, strict=True)]
    return {"series": rows, "skipped": skipped, "settings": caller.settings}


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
