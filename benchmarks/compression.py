"""Time of the gradient exchange in 16 bits against that in 32, by size.

    python benchmarks/compression.py --controllers mpirun gloo --ranks 2 --out results.json

One launch for each controller. In it `none`, `fp16` and `bf16` take turns, one exchange of a float32 gradient each, so
that they see the same machine; the first round compiles and is not counted. An exchange's time is that of the slowest
rank. Reported are the medians over the rounds and their ratios to `none`: above 1 compression slows training.
Nothing else may run on the machine meanwhile.
"""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from hvdtrain.bench.script import Script, print_times, started
from hvdtrain.bench.timing import in_turn, window

KIB = 1024
SIZES = {"64 KB": 64 * KIB, "1 MB": KIB**2, "16 MB": 16 * KIB**2, "64 MB": 64 * KIB**2}
KINDS = ("none", "fp16", "bf16")


def measure(rounds: int) -> dict[str, Any]:
    """Return each size's and kind's milliseconds on every rank of a launch."""
    backend, _, gather = started()
    times = {}
    for name, size in SIZES.items():
        sides = {f"{name} {kind}": partial(window, exchange(backend, size // 4, kind), 1) for kind in KINDS}
        times |= in_turn(sides, rounds, gather)
    return {"ms": times}


def exchange(backend: Any, count: int, kind: Any) -> Callable[[], Any]:
    """Return a compiled exchange of `count` float32 values."""
    import tensorflow as tf

    from hvdtrain.gradients.reduction import GradientReducer, ReductionOptions

    values = tf.Variable(tf.random.stateless_normal([count], [1, backend.index]))
    reducer = GradientReducer(backend, ReductionOptions("sum", kind))
    role = f"benchmark/{count}/{kind}"
    return tf.function(lambda: reducer.reduce([values.read_value()], ["values"], role=role)[0][:1], autograph=False)


def main() -> int:
    script = Script(__doc__, measure, rounds=15, ranks=2)
    options = script.parsed()
    for controller in options.controllers:
        job = script.job("exchange", measure, controller=controller, ranks=options.ranks, rounds=options.rounds)
        for run in script.measure([job]):
            for size in SIZES:
                times = {kind: run.figure("ms")[0][f"{size} {kind}"] for kind in KINDS}
                print_times(f"{controller:6} {options.ranks} ranks {size:>6}", times, "none")
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
