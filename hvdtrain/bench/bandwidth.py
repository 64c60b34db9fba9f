"""Bandwidth of collectives as nccl-tests defines it; pure functions.

https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: with the size S in bytes and the time t, the
algorithm bandwidth is S / t. The bus bandwidth is that times a factor of the number of ranks n, which makes it the
traffic over the slowest link, whatever n is: 2 (n - 1) / n for all-reduce, (n - 1) / n for all-gather, reduce-scatter
and all-to-all, 1 for broadcast. S is the larger of a rank's input and output: the output of all-gather, the input of
the others.
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
"""Not a collective: every rank adds an array of S bytes to another, the lower bound of a reduction."""


def algorithm_bandwidth(size: int, milliseconds: float) -> float:
    """Return S / t in GB/s (1e9 bytes a second)."""
    return size / milliseconds / 1e6


def bus_bandwidth(collective: str, size: int, milliseconds: float, ranks: int) -> float | None:
    """Return the bus bandwidth in GB/s; None if `collective` is not one."""
    if collective not in FACTORS:
        return None
    return algorithm_bandwidth(size, milliseconds) * FACTORS[collective](ranks)


def calls(size: int) -> int:
    """Return the number of calls per measurement: 256 MB together, between 5 and 100 calls."""
    return max(5, min(100, 256_000_000 // size))


def parsed_size(text: str) -> int:
    """Parse a size such as `4KB`, `16MB` or `1000` to bytes; units are powers of 1000.

    Raises:
        ValueError: not a size, or less than 1 KB.
    """
    units = {"KB": 1000, "MB": 1000**2, "GB": 1000**3}
    number, factor = next(((text[:-2], f) for unit, f in units.items() if text.upper().endswith(unit)), (text, 1))
    size = int(number) * factor
    if size < 1000:
        raise ValueError(text)
    return size


def shown_size(size: int) -> str:
    """Format a size as `parsed_size` reads it."""
    for unit, factor in (("GB", 1000**3), ("MB", 1000**2), ("KB", 1000)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} bytes"
