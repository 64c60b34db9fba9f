"""What Horovod's engine costs ranks that have nothing to exchange, and how soon they exchange what comes then.

    python benchmarks/engine.py --controllers mpirun gloo --rounds 3 --out results.json
    python benchmarks/engine.py --other old/bin/python      # and in turn, the Horovod of another environment

    idle %         of a core, by all threads of a rank that sleeps after a barrier: Horovod's, Gloo's, and what watches
    switches       their context switches in a second
    waiting ms     an all-reduce of `--kb` from Python, which each rank calls after a pause, as others do at that time
    in a row ms    one of many such all-reduces, called by a compiled function

Reported are medians over the rounds, of the slower rank. Nothing else may run on the machine meanwhile.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from hvdtrain.bench.script import Script, started

CALLS = 150
PAUSE_S = 0.005
FIGURES = {"idle": "idle %", "switches": "switches", "waiting": "waiting ms", "in_a_row": "in a row ms"}


def wait(seconds: float, kb: float) -> dict[str, Any]:
    """Return the figures of a rank that waits."""
    _, _, gather = started()
    import tensorflow as tf

    import hvdtrain

    tensor = tf.ones([int(256 * kb)])
    reduced = tf.function(lambda: hvdtrain.allreduce(tensor, name="in_a_row"))
    for _ in range(10):
        hvdtrain.allreduce(tensor, name="waiting")
        reduced()
    time.sleep(1.0)  # what the first calls have left to do
    switches, processor, begin = context_switches(), time.process_time(), time.perf_counter()
    time.sleep(seconds)
    passed = time.perf_counter() - begin
    idle = 100.0 * (time.process_time() - processor) / passed
    switches = (context_switches() - switches) / passed
    waiting = []
    for _ in range(CALLS):
        hvdtrain.allreduce(tensor, name="waiting")  # so that all ranks pause at one time
        time.sleep(PAUSE_S)
        begin = time.perf_counter()
        hvdtrain.allreduce(tensor, name="waiting")
        waiting.append(1000.0 * (time.perf_counter() - begin))
    begin = time.perf_counter()
    for _ in range(CALLS):
        reduced()
    in_a_row = 1000.0 * (time.perf_counter() - begin) / CALLS
    everyone = gather([idle, switches, median(waiting), in_a_row])
    return {name: max(each) for name, each in zip(FIGURES, zip(*everyone, strict=True), strict=True)}


def context_switches() -> int:
    """Return how often threads of this process have left a core."""
    lines = [line for task in Path("/proc/self/task").iterdir() for line in _lines(task / "status")]
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:  # the thread has ended
        return []


def main() -> int:
    script = Script(__doc__, wait, rounds=3, ranks=2)
    script.add_argument("--seconds", type=float, default=5.0, help="that ranks sleep")
    script.add_argument("--kb", type=float, default=1.0, help="size of what is exchanged")
    script.add_argument("--other", type=Path, help="the Python of an environment with another build of Horovod")
    options = script.parsed()
    given = {"seconds": options.seconds, "kb": options.kb}
    for controller in options.controllers:
        jobs = [script.job("this", wait, controller=controller, ranks=options.ranks, **given)]
        if options.other is not None:
            words = [os.fspath(options.other) if word == sys.executable else word for word in jobs[0].command]
            jobs.append(replace(jobs[0], name="other", command=words))
        for run in script.measure(jobs, options.rounds):
            found = (f"{title} {median(run.medians(name)):8.2f}" for name, title in FIGURES.items())
            print(f"{controller:6} {options.ranks} ranks  {run.name:6} " + "   ".join(found), flush=True)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
