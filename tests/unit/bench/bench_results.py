"""Results of a comparison, as they might have been measured."""

from dataclasses import replace

from hvdtrain.bench.results import (
    Cell,
    CollectivesResults,
    EngineRun,
    GradientSize,
    Results,
    Round,
    Series,
    SuiteResults,
)

GRADIENTS = [GradientSize(1_000_000), GradientSize(2_000_000, rows_per_sample=2.0, row_bytes=68)]
PARTS = {"forward and backward": 60.0, "exchange": 30.0, "input": -1.0, "update": 11.0}
ENVIRONMENT = {
    "packages": {"hvdtrain": "0.1.0", "tensorflow": "2.21.0"},
    "python": {"version": "3.11.7"},
    "machine": {"cpu": "a processor", "cores": 2, "usable_cores": 2, "memory_gib": 8.0, "available_memory_gib": 5.0},
    "variables": {},
    "gpus": [],
    "mpi": {"mpirun": "mpirun (Open MPI) 4.1.8"},
}


def rounds(*times, foreign=0.05, parts=None):
    """A round for each step time, whose windows lie around it."""
    return [
        Round(
            windows_ms=[t, 0.9 * t, 1.2 * t],
            cpu_s=2.2 * t / 1000,
            peak_rss_mib=[500.0, 510.0],
            foreign_cores=foreign,
            breakdown_ms=parts,
        )
        for t in times
    ]


def cell(side, *times, ranks=2, batch=64, foreign=0.05, **fields):
    parts = fields.pop("parts", None)
    known = {
        "model": "mlp",
        "precision": "float32",
        "accumulate": 1,
        "command": f"python -m hvdtrain bench side {side}",
    }
    return Cell(
        side=side, ranks=ranks, batch=batch, rounds=rounds(*times, foreign=foreign, parts=parts), **known | fields
    )


def suite():
    cells = [
        cell("one-core", 200.0, 202.0, 198.0, ranks=1, gradients=GRADIENTS, parameters=750_000),
        cell("one-core", 104.0, 100.0, 102.0, ranks=1, batch=32, gradients=GRADIENTS),
        cell("horovod-mpi", 125.0, 126.0, 124.0, parts=PARTS, settings={"threads": "1"}),
        cell("plain-mpi", 250.0, 252.0, 248.0),
        cell("mirrored", skipped="--backend mirrored is not there <yet> | at all"),
    ]
    options = {"baseline": "plain-mpi", "rounds": 3, "windows": 3, "warm_up": 2, "cores": 1}
    return SuiteResults("python -m hvdtrain bench --models mlp", options, cells)


def collectives():
    series = [
        Series(engine, name, size, [size / 1e6 * factor] * 3)
        for engine, factor in (("horovod-mpi", 2.0), ("mpi4py", 1.0))
        for name in ("allreduce", "alltoall")
        for size in (1000, 1_000_000)
    ]
    series += [Series("memory", "add", size, [size / 1e7] * 3) for size in (1000, 1_000_000)]
    runs = [EngineRun(engine=name, command=f"mpirun -np 2 {name}") for name in ("horovod-mpi", "mpi4py", "memory")]
    runs.append(EngineRun(engine="tf-ring", command="mpirun -np 2 tf-ring", skipped={"all": "it did not start"}))
    return CollectivesResults(
        command="python -m hvdtrain bench collectives", options={}, ranks=2, engines=runs, series=series
    )


def results():
    return Results(
        date="2026-11-21", host_class="2-cores", environment=ENVIRONMENT, suite=suite(), collectives=collectives()
    )


def with_times(known, side, *times):
    """Results in which `side` took other times."""
    cells = [replace(c, rounds=rounds(*times)) if c.side == side else c for c in known.suite.cells]
    return replace(known, suite=replace(known.suite, cells=cells))
