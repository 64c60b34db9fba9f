"""Bandwidth of collectives as nccl-tests defines it; pure functions.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: with the size S in bytes and the time t, the
algorithm bandwidth is S / t. The bus bandwidth is that times a factor of the number of ranks n, which makes it the
traffic over the slowest link, whatever n is: 2 (n - 1) / n for all-reduce, (n - 1) / n for all-gather, reduce-scatter
and all-to-all, 1 for broadcast. S is the larger of what a rank gives and what it gets: of all-gather the result, of
the others what a rank gives.
"""

from collections.abc import Callable

FACTORS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
}
COLLECTIVES = tuple(FACTORS)
ADD = "add"
"""Not a collective: every rank adds an array of S bytes to another. It is the least that reducing takes."""


def algorithm_bandwidth(size: int, milliseconds: float) -> float:
    """Return S / t in GB/s (1e9 bytes a second)."""
    return size / milliseconds / 1e6


def bus_bandwidth(collective: str, size: int, milliseconds: float, ranks: int) -> float | None:
    """Return the bus bandwidth in GB/s; None for what is no collective."""
    if collective not in FACTORS:
        return None
    return algorithm_bandwidth(size, milliseconds) * FACTORS[collective](ranks)


def calls(size: int) -> int:
    """Return how many calls one time is the median of: 256 MB together, but 5 at least and 100 at most."""
    return max(5, min(100, 256_000_000 // size))


def parsed_size(text: str) -> int:
    """Return the bytes of `4KB`, `16MB`, `1000`: powers of 1000.

    Raises:
        ValueError: it is no size, or less than 1 KB.
    """
    units = {"KB": 1000, "MB": 1000**2, "GB": 1000**3}
    number, factor = next(((text[:-2], f) for unit, f in units.items() if text.upper().endswith(unit)), (text, 1))
    size = int(number) * factor
    if size < 1000:
        raise ValueError(text)
    return size


def shown_size(size: int) -> str:
    """Return a size as one types it."""
    for unit, factor in (("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} bytes"
