"""Results of a comparison, as they might have been measured."""

from dataclasses import replace

from hvdtrain.bench.results import Comparison, Results, Round, Run

GRADIENTS = [{"bytes": 1_000_000}, {"bytes": 2_000_000, "rows_per_sample": 2.0, "row_bytes": 68}]
PARTS = {"forward and backward": 60.0, "exchange": 30.0, "input": -1.0, "update": 11.0}
ENVIRONMENT = {
    "packages": {"hvdtrain": "0.1.0", "tensorflow": "2.21.0"},
    "python": {"version": "3.11.7"},
    "machine": {"cpu": "a processor", "cores": 2, "usable_cores": 2, "memory_gib": 8.0, "available_memory_gib": 5.0},
    "variables": {},
    "gpus": [],
    "mpi": {"mpirun": "mpirun (Open MPI) 4.1.8"},
}


def run(side, *times, ranks=2, batch=64, accumulate=1, foreign=0.05, parts=None, **fields):
    """A side that took these times in its rounds, with windows around them."""
    rounds = [
        Round(
            figures={
                "windows_ms": [t, 0.9 * t, 1.2 * t],
                "cpu_s": 2.2 * t / 1000,
                "peak_rss_mib": [500.0, 510.0],
                **({} if parts is None else {"breakdown_ms": parts}),
            },
            foreign_cores=foreign,
        )
        for t in times
    ]
    setting = {"model": "mlp", "ranks": ranks, "batch": batch, "precision": "float32", "accumulate": accumulate}
    return Run(name=side, setting=setting, command=f"python -m hvdtrain bench side {side}", rounds=rounds, **fields)


def suite():
    ideal = {"gradients": GRADIENTS, "parameters": 750_000}
    runs = [
        run("one-core", 200.0, 202.0, 198.0, ranks=1, facts=ideal),
        run("one-core", 104.0, 100.0, 102.0, ranks=1, batch=32, facts=ideal),
        run("horovod-mpi", 125.0, 126.0, 124.0, parts=PARTS, facts={"settings": {"threads": "1"}}),
        run("plain-mpi", 250.0, 252.0, 248.0),
        run("mirrored", skipped="--backend mirrored is not there <yet> | at all"),
    ]
    options = {"baseline": "plain-mpi", "rounds": 3, "windows": 3, "warm_up": 2, "cores": 1}
    return Comparison("python -m hvdtrain bench --models mlp", options, runs)


def collectives():
    names = [f"{name} {size}" for name in ("allreduce", "alltoall") for size in (1000, 1_000_000)]

    def engine(name, names, factor):
        ms = {each: int(each.split()[1]) / 1e6 * factor for each in names}
        return Run(name=name, command=f"mpirun -np 2 {name}", rounds=[Round(figures={"ms": ms}, foreign_cores=0.0)] * 3)

    runs = [engine("horovod-mpi", names, 2.0), engine("mpi4py", names, 1.0)]
    runs.append(engine("memory", ["add 1000", "add 1000000"], 0.1))
    runs.append(Run(name="tf-ring", command="mpirun -np 2 tf-ring", skipped="it did not start"))
    return Comparison("python -m hvdtrain bench collectives", {"ranks": 2}, runs)


def results(**comparisons):
    known = comparisons or {"suite": suite(), "collectives": collectives()}
    return Results(date="2026-11-21", host_class="2-cores", environment=ENVIRONMENT, comparisons=known)


def with_runs(known, kind, runs):
    """Results with other runs of a kind."""
    comparison = replace(known.comparisons[kind], runs=runs)
    return replace(known, comparisons={**known.comparisons, kind: comparison})
