"""What an update rule costs and saves: sharded slots and local steps against the all-reduce, in turn in one run.

    python benchmarks/update_rules.py --models mlp lm --optimizers adam sgd --controllers mpirun gloo --rounds 7

One launch for each model, optimizer and controller, in which the rules take turns, a window of a few steps each;
`alone` is the step without any exchange. A window's time is that of the slowest rank. Reported are medians over the
rounds, their ratios to the all-reduce of the same round, and the bytes that a rank holds for the slots (`memory.py` has
the peaks). Nothing else may run on the machine meanwhile.
"""

import sys
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from options import MODELS, ours

from hvdtrain.bench.script import Script, print_times, started
from hvdtrain.bench.timing import in_turn, window

RULES: dict[str, dict[str, Any]] = {
    "all_reduce": {},
    "zero=1": {"zero": 1},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3},
    "zero=3, prefetch=1": {"zero": 3, "zero_prefetch": 1},
    "local_steps=4": {"local_steps": 4},
    "local_steps=16": {"local_steps": 16},
    "alone": {},
}
OPTIMIZERS = {"sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {})}


def slot_bytes(rule: Any) -> int:
    """Return what this rank keeps beside the weights."""
    tensors = [tensor.value for path, tensor in rule.named_tensors().items() if not path.startswith("model/")]
    return sum(int(np.prod(tensor.shape)) * tensor.dtype.size for tensor in tensors)


def measure(model: str, optimizer: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return each rule's windows in milliseconds a step, those of the slowest rank, and its bytes."""
    backend, alone, gather = started()
    import keras

    kind, arguments = OPTIMIZERS[optimizer]
    runs = {}
    for rule, options in RULES.items():
        made = getattr(keras.optimizers, kind)(1e-4, **arguments)
        runs[rule] = ours(model, alone if rule == "alone" else backend, MODELS[model][4], options, made)
    times = in_turn({rule: partial(window, step, steps) for rule, step in runs.items()}, rounds, gather)
    return {"ms": times, "slot_bytes": {rule: slot_bytes(step.rule) for rule, step in runs.items()}}


def main() -> int:
    script = Script(__doc__, measure, rounds=7, ranks=2)
    script.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["mlp", "lm"])
    script.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=["adam"])
    script.add_argument("--steps", type=int, default=16, help="steps of a window: a multiple of the local steps")
    options = script.parsed()
    for model, optimizer, controller in product(options.models, options.optimizers, options.controllers):
        given = {"model": model, "optimizer": optimizer, "steps": options.steps, "rounds": options.rounds}
        job = script.job("in turn", measure, controller=controller, ranks=options.ranks, **given)
        for run in script.measure([job]):
            sizes = run.figure("slot_bytes")[0]
            notes = {rule: f"{size / 2**20:7.1f} MiB of slots" for rule, size in sizes.items()}
            print_times(f"{model:9} {optimizer:9} {controller:6}", run.figure("ms")[0], "all_reduce", notes)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
