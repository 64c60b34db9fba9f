"""What one more rank costs the others: CPU time of a rank in worlds of growing size.

    python benchmarks/growth.py --sizes 2 4 8 16 --controllers mpirun gloo --rounds 3

More ranks than cores share them, so that seconds say nothing; CPU time of all threads of a process does, as far as it
does not wait by polling. Per rank, as its mean over the ranks and for rank 0, where messages meet:

    start ms       `hvdtrain.init()`, with its imports done before
    step ms        a step of a tiny model in `fit`
    checkpoint ms  one checkpoint of it
    gather ms      an exchange of 100 bytes over the control channel
    board ms       a second of rest with one look at what all ranks have posted
    failure ms     the report of the last rank's failure, until a rank has heard of it

Nothing else may run on the machine meanwhile.
"""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from statistics import mean, median
from typing import Any

from hvdtrain.bench.script import Script
from hvdtrain.config.errors import LaunchError

FIGURES = ("start", "step", "checkpoint", "gather", "board", "failure")
BATCH, STEPS, CALLS, LOOKS = 8, 60, 30, 5
"""Samples of a rank and step; steps, exchanges and looks that are measured."""


def cost(call: Callable[[], Any], times: int = 1) -> float:
    """Return the CPU milliseconds that all threads of this process take while `call` is called."""
    begin = time.process_time()
    for _ in range(times):
        call()
    return 1000.0 * (time.process_time() - begin) / times


def grow() -> dict[str, Any]:
    """Return the figures, each as its mean over the ranks and that of rank 0."""
    import keras
    import numpy as np

    import hvdtrain
    import hvdtrain.training.trainer  # imports are the same on any number of ranks

    found = {"start": cost(hvdtrain.init)}
    from hvdtrain.runtime.session import current

    control, size = current().control, hvdtrain.size()
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(1e-3), "mse")
    x, y = np.ones((BATCH * size * STEPS, 8), "float32"), np.ones((BATCH * size * STEPS, 1), "float32")
    fit = {"batch": BATCH * size, "verbose": 0, "log_every": 1000}
    trainer.fit(x, y, **fit)
    found["step"] = cost(lambda: trainer.fit(x, y, **fit)) / STEPS
    folder = control.exchange(tempfile.mkdtemp().encode() if control.rank == 0 else b"", timeout=60.0)[0].decode()
    found["checkpoint"] = cost(lambda: trainer.save(folder))
    found["gather"] = cost(lambda: control.exchange(b"x" * 100, timeout=60.0), CALLS)

    def look() -> None:
        time.sleep(1.0)  # as what watches does
        with suppress(LaunchError):  # the store of horovodrun is busy: as if nobody had posted
            control.read("growth")

    with suppress(LaunchError):
        control.post("growth", b"x" * 100)
    found["board"] = cost(look, LOOKS)
    if control.rank == 0:
        shutil.rmtree(folder)

    def hear() -> None:
        if control.rank == size - 1:
            control.report_failure("of the last rank")
        while control.rank < size - 1 and not control.failures():
            time.sleep(0.05)  # as a rank that waits for the cause

    found["failure"] = cost(hear)
    everyone = [json.loads(each) for each in control.exchange(json.dumps(found).encode(), timeout=60.0)]
    by_figure = {name: [each[name] for each in everyone] for name in FIGURES}
    means = {name: mean(each) for name, each in by_figure.items()}
    return means | {f"{name}_first": each[0] for name, each in by_figure.items()}


def main() -> int:
    script = Script(__doc__, grow, rounds=3, ranks=2)
    script.add_argument("--sizes", type=int, nargs="+", default=[2, 4, 8, 16])
    options = script.parsed()
    for controller in options.controllers:
        jobs = [script.job(f"{size} ranks", grow, controller=controller, ranks=size) for size in options.sizes]
        for run in script.measure(jobs, options.rounds):
            both = [(name, *(median(run.medians(f"{name}{of}")) for of in ("", "_first"))) for name in FIGURES]
            figures = (f"{name} {every:8.2f} ({first:8.2f})" for name, every, first in both)
            print(f"{controller:6} {run.name:8}  " + "   ".join(figures) + " ms", flush=True)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
