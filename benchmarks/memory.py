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

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, started
from hvdtrain.bench.timing import forget_peak, peak_rss_mib

BLOCK_BYTES = 64 * 1024
"""Larger blocks of memory go back to the system at once."""
FREEING = ("env", "TF_ENABLE_ONEDNN_OPTS=0", f"MALLOC_MMAP_THRESHOLD_={BLOCK_BYTES}")
"""Starts a command whose peak of memory is what it needs."""
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


def measure(stage: int, depth: int, width: int, prefetch: int, accumulate: int) -> dict[str, Any]:
    """Return the largest peak of all ranks, and the number of parameters."""
    import hvdtrain

    *_, gather = started()
    import keras

    layers = [keras.layers.Dense(width, "tanh") for _ in range(depth)]
    options = {"zero": stage, "zero_prefetch": prefetch if stage == 3 else 0, "accumulate": accumulate}
    trainer = hvdtrain.Trainer(keras.Sequential([keras.Input((width,)), *layers]), "adam", "mse", **options)
    peaks = gather(peak_of_steps(trainer, width, accumulate))
    return {"peak_mib": max(peaks), "parameters": trainer.state.parameters()}


def peak_of_steps(trainer: Any, width: int, accumulate: int) -> float:
    """Return the peak of a few steps in MiB; in `fit`, callbacks would be shown whole weights between two of them."""
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
    return peak_rss_mib()


def main() -> int:
    script = Script(__doc__, measure)
    script.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    script.add_argument("--stages", nargs="+", type=int, choices=tuple(FORMULAS), default=list(FORMULAS))
    script.add_argument("--controllers", nargs="+", choices=("mpirun", "gloo"), default=["mpirun"])
    script.add_argument("--width", type=int, default=2048, help="of each layer, with width x width weights")
    script.add_argument("--depths", nargs=2, type=int, default=[6, 22])
    script.add_argument("--accumulate", nargs="+", type=int, default=[1], help="microbatches of a step")
    script.add_argument("--prefetch", type=int, default=0, help="of stage 3")
    options = script.parsed()
    print(f"{os.cpu_count()} cores, {SAMPLES} samples on each rank, layers of {options.width}")
    settings = [
        {"stage": stage, "ranks": ranks, "controller": controller, "accumulate": accumulate}
        for controller in options.controllers
        for ranks in options.ranks
        for accumulate in options.accumulate
        for stage in options.stages
    ]
    for setting in settings:
        given = {"width": options.width, "prefetch": options.prefetch, **setting}
        jobs = [script.job(f"depth {depth}", measure, before=FREEING, depth=depth, **given) for depth in options.depths]
        runs = script.measure(jobs, limit_s=600)
        if len(runs) == 2:
            print_setting(setting, [run.rounds[0].figures for run in runs], options)
    return script.exit_code()


def print_setting(setting: dict[str, Any], figures: list[Any], options: Any) -> None:
    """Print what a parameter takes, by the difference of two depths."""
    less, more = figures
    layers = options.depths[1] - options.depths[0]
    activations = layers * ACTIVATIONS * SAMPLES * options.width * 4
    grown = (more["peak_mib"] - less["peak_mib"]) * 2**20 - activations
    measured, formula = grown / (more["parameters"] - less["parameters"]), FORMULAS[setting["stage"]](setting["ranks"])
    print(
        f"{setting['controller']:6} {setting['ranks']} ranks   zero={setting['stage']}   "
        f"accumulate={setting['accumulate']}   {measured:6.2f} bytes a parameter   formula {formula:6.2f}   "
        f"{100 * (measured / formula - 1):+5.1f} %   (peaks {less['peak_mib']:.0f} and {more['peak_mib']:.0f} MiB)",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
