"""What Horovod's engine costs ranks that wait, exchange and train.

    python benchmarks/engine.py --controllers mpirun gloo --models digits resnet20 --rounds 3 --out results.json
    python benchmarks/engine.py --other old/bin/python --set HOROVOD_CYCLE_TIME=0.5     # and in turn, another Horovod

    wait     idle %        of a core, by all threads of a rank that sleeps after a barrier: Horovod's, Gloo's, watchers
             switches      their context switches in a second
             waiting ms    an all-reduce of 1 KB from Python, which each rank calls after a pause, as others do then
    reduce   ms            an all-reduce of each of `--kb` in a compiled loop of them; beside it, under MPI, that by
                           mpi4py in the same processes: the difference is what Horovod and TensorFlow add before the
                           first byte and after the last one
    train    ms            a step of each of `--models`
             processor ms  of rank 0 in it, all threads
             switches      context switches of rank 0 in it
             pair          the same processes exchange nothing, each with its part of the batch: the slower one

Reported are medians over the rounds; of what waits and reduces, of the slower rank. Nothing else may run on the machine
meanwhile.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, started
from hvdtrain.bench.suite import MODELS, bench_config

CALLS = 150
PAUSE_S = 0.005
WINDOW = 10
"""Steps between two looks at the clock."""


def wait(seconds: float) -> dict[str, Any]:
    """Return the figures of a rank that waits."""
    _, _, gather = started()
    import tensorflow as tf

    import hvdtrain

    tensor = tf.ones([256])
    for _ in range(10):
        hvdtrain.allreduce(tensor, name="waiting")
    time.sleep(1.0)  # what the first calls have left to do
    before, begin = _used(), time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - begin
    processor, switches = _used() - before
    waiting = []
    for _ in range(CALLS):
        hvdtrain.allreduce(tensor, name="waiting")  # so that all ranks pause at one time
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        hvdtrain.allreduce(tensor, name="waiting")
        waiting.append(1000.0 * (time.perf_counter() - begin))
    mine = {"idle %": 100.0 * processor / passed, "switches": switches / passed, "waiting ms": median(waiting)}
    return _slower(gather(list(mine.values())), list(mine))


def reduce(kb: Sequence[float]) -> dict[str, Any]:
    """Return the time of an all-reduce of each size, in milliseconds."""
    _, _, gather = started()
    import tensorflow as tf

    import hvdtrain

    @tf.function
    def reduced(tensor: Any, calls: Any) -> Any:
        loop = (tf.constant(0), tensor)
        return tf.while_loop(lambda n, _: n < calls, lambda n, x: (n + 1, hvdtrain.allreduce(x, name="row")), loop)[1]

    mine: dict[str, float] = {}
    for size in kb:
        numbers, calls = np.ones(int(256 * size), np.float32), max(10, int(CALLS / (1 + size / 1024)))
        tensor = tf.constant(numbers)
        mine[f"{size:g} KB ms"] = _in_a_row(partial(reduced, tensor), calls)
        if os.environ.get("OMPI_COMM_WORLD_SIZE"):
            mine[f"{size:g} KB ms by MPI"] = _in_a_row(_by_mpi(numbers), calls)
    return _slower(gather(list(mine.values())), list(mine))


def _by_mpi(numbers: np.ndarray) -> Callable[[Any], None]:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False  # Horovod does
    from mpi4py import MPI

    def reduced(calls: int) -> None:
        out = np.empty_like(numbers)
        for _ in range(calls):
            MPI.COMM_WORLD.Allreduce(numbers, out)

    return reduced


def _in_a_row(function: Callable[[Any], object], calls: int) -> float:
    import tensorflow as tf

    count = tf.constant(calls)
    function(count)
    begin = time.perf_counter()
    function(count)
    return 1000.0 * (time.perf_counter() - begin) / calls


def train(model: str, windows: int, batch: int, pair: bool = False) -> dict[str, Any]:
    """Return the figures of a step; of a `pair`, which exchanges nothing, those of the slower rank."""
    backend, alone, gather = started()
    from hvdtrain.bench.trained import Stopwatch, built_trainer
    from hvdtrain.training.plan import Plan

    trainer, data = built_trainer(bench_config(model, batch=batch), alone if pair else backend)
    used: list[np.ndarray] = []
    watch = Stopwatch(WINDOW, lambda: used.append(_used()))
    trainer.train(data, Plan((windows + 2) * WINDOW, log_every=WINDOW), observers=watch)
    if not used:  # rank 0 alone has progress
        return {}
    processor, switches = (float(each) for each in np.median(np.diff(used, axis=0)[1:], axis=0) / WINDOW)
    mine = {"ms": median(watch.windows_ms[2:]), "processor ms": 1000.0 * processor, "switches": switches}
    return _slower(gather(list(mine.values())), list(mine)) if pair else mine


def _slower(everyone: list[list[float]], names: list[str]) -> dict[str, Any]:
    return {name: max(each) for name, each in zip(names, zip(*everyone, strict=True), strict=True)}


def _used() -> np.ndarray:
    """Return the seconds on a core that this process has taken, and how often its threads have left one."""
    lines = [line for task in Path("/proc/self/task").iterdir() for line in _lines(task / "status")]
    return np.array([time.process_time(), sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)])


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # the thread has ended
        return []


def main() -> int:
    script = Script(__doc__, wait, reduce, train, rounds=3, ranks=2)
    script.add_argument("--seconds", type=float, default=5.0, help="that ranks sleep")
    script.add_argument("--kb", type=float, nargs="+", default=[1, 64, 4096], help="sizes of what is exchanged")
    script.add_argument("--models", nargs="+", choices=list(MODELS), default=["resnet20"])
    script.add_argument("--windows", type=int, default=10, help="of ten steps")
    script.add_argument("--other", type=Path, help="the Python of an environment with another build of Horovod")
    script.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="variables for the other one")
    options = script.parsed()
    calls: list[tuple[Any, dict[str, Any]]] = [(wait, {"seconds": options.seconds}), (reduce, {"kb": options.kb})]
    each = {"windows": options.windows}
    calls += [(train, {"model": model, "batch": MODELS[model].data.batch, **each}) for model in options.models]
    for controller in options.controllers:
        for function, given in calls:
            place = {"controller": controller, "ranks": options.ranks}
            jobs = [script.job("this", function, **place, **given)]
            if function is train:
                part = {"batch": given["batch"] // options.ranks, "pair": True}
                jobs.append(script.job("pair", function, **place, **{**given, **part}))
            if options.other is not None:
                words = [os.fspath(options.other) if word == sys.executable else word for word in jobs[0].command]
                variables = dict(each.split("=", 1) for each in options.set)
                jobs.append(replace(jobs[0], name="other", command=words, environ=variables))
            for run in script.measure(jobs, options.rounds):
                found = (f"{name} {median(run.medians(name)):.2f}" for name in run.rounds[0].figures)
                what = given.get("model", function.__name__)
                print(f"{controller:6} {options.ranks} ranks  {what:8} {run.name:6} " + "   ".join(found), flush=True)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
