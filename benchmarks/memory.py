"""Peak memory of the stages of ZeRO beside its formula: bytes for each parameter, with Adam in float32.

    python benchmarks/memory.py --ranks 2 4 --controllers mpirun gloo --accumulate 1 2

One launch for each stage, number of ranks and depth of a stack of dense layers, in which every rank takes a few steps,
has the system forget the peak of its resident memory so far, and takes a few more. Reported is the difference of the
peaks of two depths over that of their parameters, for the rank that needs most: what does not grow with the model, such
as TensorFlow itself, the buffers of the exchange and the one layer that is whole, is in both. The activations of a
sample are known, and taken off. What is freed goes back to the system at once: oneDNN's allocator would keep it for the
next step (`TF_ENABLE_ONEDNN_OPTS=0` does without), and the C library would keep blocks of less than some megabytes
(`MALLOC_MMAP_THRESHOLD_`). A training leaves both as they are, and takes up to twice
as much.

The formula for n ranks: 16 bytes without ZeRO, half of them for Adam's two moments; 8 + 8/n, 4 + 12/n and 16/n in its
stages (Rajbhandari et al. 2020, arXiv:1910.02054). It takes all gradients to be there at once. In a step of one
microbatch they are not: each is exchanged, used and given back while others are yet to be computed, and what is
measured may lie below it. With several (`--accumulate`) each rank keeps the sum over them until it is exchanged, from
stage 2 on of its slices.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import FREEING, launcher, printed, write

LIMIT_S = 600
WARM_UP, STEPS = 4, 6
SAMPLES = 8
"""Of a microbatch on each rank."""
ACTIVATIONS = 3
"""Tensors of a layer's width that a sample leaves for the backward pass: its input, its sum, its output."""
FORMULAS: dict[int, Callable[[int], float]] = {
    0: lambda n: 16.0,
    1: lambda n: 8 + 8 / n,
    2: lambda n: 4 + 12 / n,
    3: lambda n: 16 / n,
}
"""Bytes for each parameter, by stage."""


def peak_bytes() -> int:
    """Return the peak of this process's resident memory since `forget_peak`."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux tells it"
    return int(found[1]) * 1024


def forget_peak() -> None:
    """Let `peak_bytes` begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(stage: int, depth: int, width: int, prefetch: int, accumulate: int) -> None:
    """Run on every rank of a launch; rank 0 prints the largest peak, and the number of parameters."""
    import hvdtrain

    hvdtrain.init()
    import keras

    layers = [keras.layers.Dense(width, "tanh") for _ in range(depth)]
    options = {"zero": stage, "zero_prefetch": prefetch if stage == 3 else 0, "accumulate": accumulate}
    trainer = hvdtrain.Trainer(keras.Sequential([keras.Input((width,)), *layers]), "adam", "mse", **options)
    peak = peak_of_steps(trainer, width, accumulate)
    everyone = trainer.backend.gather_bytes(str(peak).encode(), timeout=LIMIT_S)
    if trainer.backend.primary:
        found = {"peak": max(map(int, everyone)), "parameters": trainer.state.parameters()}
        print("MEMORY " + json.dumps(found), flush=True)


def peak_of_steps(trainer: Any, width: int, accumulate: int) -> int:
    """Return the peak of a few steps; in `fit`, callbacks would be shown whole weights between two of them."""
    from hvdtrain.training.inputs import training_data

    batch = SAMPLES * accumulate * trainer.backend.size
    inputs = np.ones((batch * (WARM_UP + STEPS), width), "float32")
    data = training_data((inputs, inputs), trainer.backend, batch=batch, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    trainer.broadcast_state()
    step, batches = trainer.compiled_step(data), iter(data.batches(0))
    for number in range(WARM_UP + STEPS):
        if number == WARM_UP:
            forget_peak()
        step(next(batches), measure=False).totals.numpy()
    return peak_bytes()


def report(setting: dict[str, Any], arguments: argparse.Namespace) -> dict[str, object]:
    """Measure two depths and print what a parameter takes."""
    less, more = (launched(setting, depth, arguments) for depth in arguments.depths)
    layers = arguments.depths[1] - arguments.depths[0]
    activations = layers * ACTIVATIONS * SAMPLES * arguments.width * 4
    measured = (more["peak"] - less["peak"] - activations) / (more["parameters"] - less["parameters"])
    formula = FORMULAS[setting["stage"]](setting["ranks"])
    print(
        f"{setting['controller']:6} {setting['ranks']} ranks   zero={setting['stage']}   "
        f"accumulate={setting['accumulate']}   {measured:6.2f} bytes a parameter   formula {formula:6.2f}   "
        f"{100 * (measured / formula - 1):+5.1f} %   (peaks {less['peak'] >> 20} and {more['peak'] >> 20} MiB)",
        flush=True,
    )
    return {**setting, "bytes": measured, "formula": formula}


def launched(setting: dict[str, Any], depth: int, arguments: argparse.Namespace) -> dict[str, int]:
    """Return what `measure` prints, of a launch of its own."""
    sizes = {"stage": setting["stage"], "accumulate": setting["accumulate"]}
    sizes |= {"depth": depth, "width": arguments.width, "prefetch": arguments.prefetch}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    command = [*launcher(setting["controller"], setting["ranks"]), *FREEING, sys.executable, __file__, *words]
    found: dict[str, int] = printed(command, "MEMORY", limit_s=LIMIT_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--stages", nargs="+", type=int, choices=tuple(FORMULAS), default=list(FORMULAS))
    parser.add_argument("--controllers", nargs="+", choices=("mpirun", "gloo"), default=["mpirun"])
    parser.add_argument("--width", type=int, default=2048, help="of each layer, with width x width weights")
    parser.add_argument("--depths", nargs=2, type=int, default=[6, 22])
    parser.add_argument("--accumulate", nargs="+", type=int, default=[1], help="microbatches of a step")
    parser.add_argument("--prefetch", type=int, default=0, help="of stage 3")
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    parser.add_argument("--stage", type=int, choices=tuple(FORMULAS), help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage is not None:
        measure(arguments.stage, arguments.depth, arguments.width, arguments.prefetch, arguments.accumulate[0])
        return
    print(f"{os.cpu_count()} cores, {SAMPLES} samples on each rank, layers of {arguments.width}")
    results = [
        report({"stage": stage, "ranks": ranks, "controller": controller, "accumulate": accumulate}, arguments)
        for controller in arguments.controllers
        for ranks in arguments.ranks
        for accumulate in arguments.accumulate
        for stage in arguments.stages
    ]
    write(arguments, results)


if __name__ == "__main__":
    main()
