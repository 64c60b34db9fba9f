"""What an update rule costs and saves: sharded slots and local steps against the all-reduce, in turn in one run.

    python benchmarks/update_rules.py --models mlp lm --optimizers adam sgd --controllers mpirun gloo --rounds 7

One launch for each model, optimizer and controller, in which the rules take turns, a window of a few steps each;
`alone` is the step without any exchange. A window's time is that of the slowest rank. Reported are medians over the
rounds, their ratios to the all-reduce of the same round, and the bytes that a rank holds for the slots (`memory.py` has
the peaks). Nothing else may run on the machine meanwhile.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from harness import launcher, printed, write
from options import LIMIT_S, MODELS, ours, window

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


def measure(name: str, optimizer: str, steps: int, rounds: int) -> None:
    """Run on every rank of a launch; rank 0 prints each rule's windows, those of the slowest rank, and its bytes."""
    import hvdtrain

    hvdtrain.init()
    import keras

    from hvdtrain.backends.select import backend_for
    from hvdtrain.backends.single import SingleBackend
    from hvdtrain.runtime.session import current

    backend, alone = backend_for(current()), SingleBackend(current())
    kind, arguments = OPTIMIZERS[optimizer]
    runs = {
        rule: ours(
            name,
            alone if rule == "alone" else backend,
            MODELS[name][4],
            options,
            getattr(keras.optimizers, kind)(1e-4, **arguments),
        )
        for rule, options in RULES.items()
    }
    taken: dict[str, list[float]] = {rule: [] for rule in runs}
    for number in range(rounds + 1):
        for rule, step in runs.items():
            backend.gather_bytes(b"", timeout=LIMIT_S)  # nobody computes while others begin
            milliseconds = window(step, steps if number else 3)
            if number:
                taken[rule].append(milliseconds)
    by_rank = [json.loads(text) for text in backend.gather_bytes(json.dumps(taken).encode(), timeout=LIMIT_S)]
    if backend.primary:
        times = {rule: np.max([mine[rule] for mine in by_rank], axis=0).tolist() for rule in taken}
        sizes = {rule: slot_bytes(step.rule) for rule, step in runs.items()}
        print("RULES " + json.dumps({"times": times, "bytes": sizes}), flush=True)


def report(name: str, optimizer: str, controller: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure one model, optimizer and controller, and print a line for each rule."""
    command = [*launcher(controller, arguments.ranks), sys.executable, __file__, "--rank", name]
    command += ["--optimizers", optimizer, "--steps", str(arguments.steps), "--rounds", str(arguments.rounds)]
    found = printed(command, "RULES", limit_s=LIMIT_S)
    rows: dict[str, object] = {}
    base = np.array(found["times"]["all_reduce"])
    for rule, values in found["times"].items():
        ratios = np.array(values) / base
        row = {"ms": float(np.median(values)), "to_all_reduce": float(np.median(ratios)), "bytes": found["bytes"][rule]}
        rows[rule] = {**row, "ratio_min": float(ratios.min()), "ratio_max": float(ratios.max()), "times_ms": values}
        print(
            f"{name:9} {optimizer:9} {controller:6} {rule:15} {row['ms']:8.1f} ms a step   "
            f"{row['to_all_reduce']:.3f} of all_reduce ({ratios.min():.3f} .. {ratios.max():.3f})   "
            f"{row['bytes'] / 2**20:7.1f} MiB of slots",
            flush=True,
        )
    return {"model": name, "optimizer": optimizer, "controller": controller, "ranks": arguments.ranks, "rules": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["mlp", "lm"])
    parser.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=["adam"])
    parser.add_argument("--controllers", nargs="+", choices=("mpirun", "gloo"), default=["mpirun", "gloo"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16, help="steps of a window: a multiple of the local steps")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    parser.add_argument("--rank", choices=tuple(MODELS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.rank, arguments.optimizers[0], arguments.steps, arguments.rounds)
        return
    results = [
        report(name, optimizer, controller, arguments)
        for name in arguments.models
        for optimizer in arguments.optimizers
        for controller in arguments.controllers
    ]
    write(arguments, results)


if __name__ == "__main__":
    main()
