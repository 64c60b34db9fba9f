"""The comparison of collectives: engines, jobs, bandwidths and the report. No TensorFlow.

Bandwidths as nccl-tests defines them, https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: with the
size S in bytes and the time t, the algorithm bandwidth is S / t. The bus bandwidth is that times a factor of the number
of ranks n, which makes it the traffic over the slowest link, whatever n is: 2 (n - 1) / n for all-reduce, (n - 1) / n
for all-gather, reduce-scatter and all-to-all, 1 for broadcast. S is the larger of a rank's input and output: the output
of all-gather, the input of the others.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hvdtrain.bench import plots
from hvdtrain.bench.engine import Job, launcher
from hvdtrain.bench.report import Block, Code, Figure, Heading, Paragraph, Table, closing, quartiles, series
from hvdtrain.bench.results import Comparison, Spread, shown, spread
from hvdtrain.bench.suite import chosen

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
HOW = (
    "Bandwidths as nccl-tests defines them (doc/PERFORMANCE.md there): with size S and time t the algorithm bandwidth "
    "is S / t, in GB/s of 1e9 bytes; the bus bandwidth is that times 2 (n - 1) / n for allreduce, (n - 1) / n for "
    "allgather, reducescatter and alltoall, 1 for broadcast, n ranks. S is what a rank gives; of allgather, what it "
    "gets. A time is the median of several calls back to back, on the slowest rank; reported is the median over the "
    "rounds, with quartiles. `memory` adds an array of S bytes to another on every rank at once: the least that "
    "reducing takes."
)


@dataclass(frozen=True)
class Engine:
    """An implementation of collectives."""

    about: str
    launcher: str
    code: str
    """The function of `callers` that opens it in each process."""
    collectives: tuple[str, ...] = COLLECTIVES


ENGINES = {
    "horovod-mpi": Engine("Horovod over MPI, called eagerly", "mpirun", "horovod"),
    "horovod-gloo": Engine("Horovod over Gloo, called eagerly", "gloo", "horovod"),
    "tf-ring": Engine(
        "TensorFlow's own collectives, gRPC ring, in compiled functions",
        "mpirun",
        "tensorflow",
        # A failing collective aborts all later ones: the one missing on CPUs comes last (TensorFlow 2.21).
        ("allreduce", "allgather", "broadcast", "alltoall", "reducescatter"),
    ),
    "mpi4py": Engine("MPI, called by mpi4py on NumPy arrays", "mpirun", "mpi"),
    "memory": Engine(
        "NumPy adds two arrays on every rank at once: no collective, but what memory allows",
        "mpirun",
        "memory",
        (ADD,),
    ),
}


def job_of(name: str, collectives: Sequence[str], sizes: Sequence[int], ranks: int) -> Job:
    """Return the job that measures the engine `name`."""
    this = chosen("engine", name, ENGINES)
    wanted = [one for one in this.collectives if one in collectives or one == ADD]
    words = [*launcher(this.launcher, ranks), sys.executable, "-m", "hvdtrain", "bench", "engine", name]
    command = [*words, "--collectives", *wanted, "--sizes", *map(str, sizes)]
    return Job(name=name, setting={"ranks": ranks}, command=command)


def algorithm_bandwidth(size: int, milliseconds: float) -> float:
    """Return S / t in GB/s (1e9 bytes a second)."""
    return size / milliseconds / 1e6


def bus_bandwidth(collective: str, size: int, milliseconds: float, ranks: int) -> float | None:
    """Return the bus bandwidth in GB/s; None if `collective` is not one."""
    if collective not in FACTORS:
        return None
    return algorithm_bandwidth(size, milliseconds) * FACTORS[collective](ranks)


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


def series_name(collective: str, size: int) -> str:
    """Return the name of a collective at a size in bytes among the times of a round."""
    return f"{collective} {size}"


# -- the report --


Series = dict[tuple[str, str, int], list[float]]
"""Milliseconds per call of all rounds, by engine, collective and bytes."""


def series_of(comparison: Comparison) -> Series:
    """Return all times of a comparison."""
    return {
        (run.name, collective, int(size)): times
        for run in comparison.runs
        for name, times in series(run, ["ms"]).items()
        for collective, size in (name.split(),)
    }


def section(comparison: Comparison) -> Iterator[Block]:
    """Yield the blocks about a comparison of collectives."""
    ranks, found = comparison.options["ranks"], series_of(comparison)
    known = list(dict.fromkeys(collective for _, collective, _ in found))
    yield Heading(f"Collectives, {ranks} ranks")
    yield Code(comparison.command)
    yield Paragraph(HOW)
    rows = [list(_panels(found, name, ranks)) for name in COLLECTIVES if name in known]
    if rows:
        yield Figure(plots.curves(rows), "time and bus bandwidth over the size, medians over the rounds")
    for name in known:
        yield Heading(name, 3)
        table = []
        for (engine, collective, size), times_ms in found.items():
            if collective == name:
                times = spread(times_ms)
                rate, bus = algorithm_bandwidth(size, times.median), bus_bandwidth(name, size, times.median, ranks)
                table.append([engine, shown_size(size), *quartiles(times, ".4g"), f"{rate:.3f}", shown(bus, 3)])
        yield Table(["engine", "size", "ms", "quartiles", "algorithm GB/s", "bus GB/s"], table)
    yield from closing(comparison.runs, {name: this.about for name, this in ENGINES.items()})


def _panels(found: Series, collective: str, ranks: int) -> Iterator[plots.Curves]:
    """Yield the panels of a collective's times and bus bandwidths, beside those of memory for a reduction."""
    wanted = [collective, ADD] if collective == "allreduce" else [collective]
    ms: dict[str, list[tuple[float, Spread]]] = {}
    rates: dict[str, list[tuple[float, Spread]]] = {}
    for (engine, each, size), times_ms in found.items():
        if each in wanted:
            times, factor = spread(times_ms), FACTORS[each](ranks) if each in FACTORS else 1.0
            ms.setdefault(engine, []).append((size, times))
            bandwidths = (factor * algorithm_bandwidth(size, time) for time in (times.high, times.median, times.low))
            rates.setdefault(engine, []).append((size, Spread(*bandwidths)))
    for what, curves in (("ms a call", ms), ("bus bandwidth, GB/s", rates)):
        yield plots.Curves(f"{collective}, {what}", "bytes", curves, scale="logarithmic", reference="memory")
