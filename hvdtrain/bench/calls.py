"""Time the collectives of one engine, on every rank of a launch; no TensorFlow."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from hvdtrain.bench.bandwidth import ADD, calls
from hvdtrain.runtime.session import Link

TIMEOUT_S = 600.0
Floats = npt.NDArray[np.float32]


class Unavailable(RuntimeError):
    """An engine has no such collective; the message says why."""


class Caller(Protocol):
    """An engine in one process."""

    settings: dict[str, str]
    """What it runs with."""

    def prepared(self, collective: str, values: Floats) -> Callable[[], Any]:
        """Return a call of `collective` that gives it `values`; what it returns can be read as an array.

        Raises:
            Unavailable: the engine has no such collective.
        """

    def meet(self) -> None:
        """Wait until all ranks are here, within microseconds of one another."""

    def close(self) -> None:
        """Leave together with the others."""


def given(collective: str, size: int, rank: int, ranks: int) -> Floats:
    """Return what `rank` gives to a collective of `size` bytes: all elements rank + 1.

    Sizes are rounded down so that they divide among the ranks.
    """
    elements = size // 4 // ranks
    return np.full(elements if collective == "allgather" else elements * ranks, rank + 1, np.float32)


def expected(collective: str, size: int, ranks: int) -> Floats:
    """Return what comes out of `given` on every rank."""
    elements, total = size // 4 // ranks, ranks * (ranks + 1) / 2
    if collective in ("allgather", "alltoall"):
        return np.repeat(np.arange(1, ranks + 1, dtype=np.float32), elements)
    if collective == "broadcast":
        return np.ones(elements * ranks, np.float32)
    return np.full(elements if collective == "reducescatter" else elements * ranks, total, np.float32)


def measure(caller: Caller, link: Link, collectives: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Time each collective at each size; every rank calls it. Times are milliseconds a call, on the slowest rank."""
    rank, ranks = link.environment.rank, link.environment.size
    series, skipped = [], {}
    for collective in collectives:
        for size in sizes:
            try:
                call = caller.prepared(collective, given(collective, size, rank, ranks))
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
    # Not the mean: a call for which memory is taken from the system for the first time costs many of the others.
    return 1000.0 * statistics.median(times)


def _check(collective: str, size: int, ranks: int, result: Any) -> None:
    if collective == ADD:
        return
    found, right = np.asarray(result), expected(collective, size, ranks)
    if not np.array_equal(found, right):
        raise RuntimeError(f"{collective} of {size} bytes came out wrong: {found[:3]} in place of {right[:3]}")
