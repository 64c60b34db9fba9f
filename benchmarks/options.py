"""What the options of the step cost: accumulation, precision and compression, against a plain loop in one run.

    python benchmarks/options.py --models mlp lm --controllers mpirun gloo --rounds 7

One launch for each model and controller. In it the variants take turns, a window of a few steps each, so that they see
the same machine:

    plain         Horovod's own tape in a hand-written loop, one microbatch on each rank
    alone         one microbatch without any exchange: the floor
    accumulate=K  K of these microbatches and one exchange
    precision, compression: one microbatch, as in `plain`, with that option
    metrics       one microbatch, with the accuracy counted in each step, as `fit` does

All are given hvdtrain's settings of the exchange. A window's time is that of the slowest rank; reported are medians
over the rounds, per microbatch, and their ratios to `plain`. What the exchange costs a sample is the time over
`alone`, per sample. Nothing else may run on the machine meanwhile.

    python benchmarks/options.py --memory

prints the peak memory of one process with and without accumulation and recomputation, each in a process of its own.
"""

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import launcher, printed, write

LIMIT_S = 900
MODELS = {
    "mlp": ("mlp", {"depth": 4, "width": 3072}, (32, 32, 3), 10, 32),
    "lm": ("transformer", {"depth": 6, "width": 320, "heads": 5}, (128,), 8192, 4),
    "resnet20": ("resnet", {}, (32, 32, 3), 10, 32),
}
"""Family, its arguments, shape of a sample, classes, samples of a microbatch on each rank."""
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "accumulate=1": {},
    "accumulate=2": {"accumulate": 2},
    "accumulate=4": {"accumulate": 4},
    "accumulate=8": {"accumulate": 8},
    "precision=mixed_float16": {"precision": "mixed_float16"},
    "precision=mixed_bfloat16": {"precision": "mixed_bfloat16"},
    "compression=fp16": {"compression": "fp16"},
    "compression=bf16": {"compression": "bf16"},
    "metrics=accuracy": {"metrics": ["accuracy"]},
}
MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {}),
    "mlp accumulate=4": ("mlp", {"accumulate": 4}),
    "lm": ("lm", {}),
    "lm recompute": ("lm", {"recompute": True}),
    "resnet20": ("resnet20", {}),
    "resnet20 recompute": ("resnet20", {"recompute": True}),
}
MEMORY_BATCH = {"mlp": 32, "lm": 32, "resnet20": 512}


def samples(name: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    _, _, shape, classes, _ = MODELS[name]
    rng = np.random.default_rng(0)
    if name == "lm":
        tokens = rng.integers(0, classes, (count, shape[0] + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    return rng.standard_normal((count, *shape), dtype=np.float32), rng.integers(0, classes, count, dtype=np.int32)


def build(name: str) -> Any:
    from hvdtrain.config.model import ModelConfig
    from hvdtrain.models.registry import build_model

    family, arguments, shape, classes, _ = MODELS[name]
    return build_model(ModelConfig(family, arguments), shape, classes, 0)


def plain(name: str) -> Callable[[], Any]:
    """Return the step of a hand-written loop, as Horovod's documentation has it."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvdtrain.bench.plain import plain_step

    model, optimizer = build(name), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = plain_step(model, optimizer, loss, hvd.DistributedGradientTape)
    x, y = map(tf.constant, samples(name, MODELS[name][4]))
    return lambda: step(x, y)


def ours(name: str, backend: Any, microbatch: int, options: dict[str, Any], optimizer: Any = None) -> Any:
    """Return hvdtrain's step, whose `rule` holds its slots."""
    import keras
    import tensorflow as tf

    from hvdtrain.data.batch import Batch
    from hvdtrain.optim.precision import with_loss_scaling
    from hvdtrain.state.train_state import TrainState
    from hvdtrain.training.assembly import built_model
    from hvdtrain.training.options import step_options
    from hvdtrain.training.step.step_factory import CompiledStepFactory, Objective

    metrics = options.get("metrics", ())
    chosen = step_options({name: value for name, value in options.items() if name != "metrics"})
    model = built_model(lambda: build(name), chosen)
    optimizer = with_loss_scaling(optimizer or keras.optimizers.SGD(0.01), model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    count = microbatch * chosen.accumulate
    x, y = map(tf.constant, samples(name, count))
    batch = Batch(x, y, None, 1.0, count * backend.size, finite=True)
    steps = CompiledStepFactory(backend, model, optimizer, Objective(loss, metrics), chosen)
    steps.build(batch, training=True)
    rule = steps.update_rule()
    state = TrainState(model, optimizer, 0, slots=rule.named_tensors)
    compiled = steps.train_step(state, rule, batch.global_samples, epoch_metrics=bool(metrics))

    def step() -> Any:
        return compiled(batch, measure=False).totals

    step.rule = rule  # type: ignore[attr-defined]
    return step


def window(step: Callable[[], Any], steps: int) -> float:
    """Return milliseconds a step."""
    begin = time.perf_counter()
    for _ in range(steps - 1):
        step()
    step().numpy()
    return 1000.0 * (time.perf_counter() - begin) / steps


def measure(name: str, variants: list[str], steps: int, rounds: int) -> None:
    """Run on every rank of a launch; rank 0 prints each variant's windows, those of the slowest rank."""
    import hvdtrain

    hvdtrain.init()
    from hvdtrain.backends.select import backend_for
    from hvdtrain.backends.single import SingleBackend
    from hvdtrain.runtime.session import current

    backend, alone = backend_for(current()), SingleBackend(current())
    microbatch = MODELS[name][4]
    runs = {"plain": plain(name)}
    for variant in variants:
        runs[variant] = ours(name, alone if variant == "alone" else backend, microbatch, VARIANTS[variant])
    taken: dict[str, list[float]] = {variant: [] for variant in runs}
    for number in range(rounds + 1):
        for variant, step in runs.items():
            backend.gather_bytes(b"", timeout=LIMIT_S)  # nobody computes while others begin
            milliseconds = window(step, steps if number else 3)
            if number:
                taken[variant].append(milliseconds)
    by_rank = [json.loads(text) for text in backend.gather_bytes(json.dumps(taken).encode(), timeout=LIMIT_S)]
    if backend.primary:
        slowest = {variant: np.max([times[variant] for times in by_rank], axis=0).tolist() for variant in taken}
        print("TIMES " + json.dumps(slowest), flush=True)


def report(name: str, controller: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Measure one model under one controller and print a line for each variant."""
    command = [*launcher(controller, arguments.ranks), sys.executable, __file__, "--rank", name]
    command += ["--steps", str(arguments.steps), "--rounds", str(arguments.rounds), "--variants", *arguments.variants]
    times = printed(command, "TIMES", limit_s=LIMIT_S)
    samples = MODELS[name][4] * arguments.ranks
    medians = {variant: float(np.median(values)) for variant, values in times.items()}
    rows: dict[str, object] = {}
    for variant, values in times.items():
        count = VARIANTS.get(variant, {}).get("accumulate", 1)
        ratios = np.array(values) / count / np.array(times["plain"])
        exchange = 1000.0 * (medians[variant] - count * medians["alone"]) / (count * samples)
        row = {"ms": medians[variant], "per_microbatch_to_plain": float(np.median(ratios)), "exchange_us": exchange}
        rows[variant] = {**row, "ratio_min": float(ratios.min()), "ratio_max": float(ratios.max()), "times_ms": values}
        print(
            f"{name:9} {controller:6} {variant:25} {row['ms']:8.2f} ms a step   per microbatch "
            f"{row['per_microbatch_to_plain']:.3f} of plain ({ratios.min():.3f} .. {ratios.max():.3f})   "
            f"over alone {exchange:8.1f} us a sample",
            flush=True,
        )
    return {"model": name, "controller": controller, "ranks": arguments.ranks, "variants": rows}


def use_memory(variant: str) -> None:
    """Take a few steps in this process and print its peak resident memory."""
    import hvdtrain

    hvdtrain.init()
    from hvdtrain.backends.single import SingleBackend
    from hvdtrain.runtime.session import current
    from hvdtrain.training.options import step_options

    name, options = MEMORY[variant]
    accumulate = step_options(options).accumulate
    step = ours(name, SingleBackend(current()), MEMORY_BATCH[name] // accumulate, options)
    for _ in range(4):
        step().numpy()
    milliseconds = float(np.median([window(step, 3) for _ in range(5)]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    parameters = build(name).count_params() * 4 / 2**20
    print("MEMORY " + json.dumps({"peak_mib": peak, "parameters_mib": parameters, "ms": milliseconds}), flush=True)


def report_memory() -> list[dict[str, object]]:
    rows = []
    for variant in MEMORY:
        found = printed([sys.executable, __file__, "--memory-of", variant], "MEMORY", limit_s=LIMIT_S)
        print(
            f"{variant:20} peak {found['peak_mib']:7.0f} MiB   parameters {found['parameters_mib']:6.1f} MiB   "
            f"{found['ms']:8.1f} ms a step",
            flush=True,
        )
        rows.append({"variant": variant, **found})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["mlp", "lm", "resnet20"])
    parser.add_argument("--controllers", nargs="+", choices=("mpirun", "gloo"), default=["mpirun", "gloo"])
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=tuple(VARIANTS),
        default=[name for name in VARIANTS if name != "precision=mixed_float16"],
        help="alone is needed; fp16, which CPUs compute hundreds of times as slowly, must be asked for",
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="steps of a window")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    parser.add_argument("--rank", choices=tuple(MODELS), help=argparse.SUPPRESS)
    parser.add_argument("--memory-of", choices=tuple(MEMORY), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        measure(arguments.rank, arguments.variants, arguments.steps, arguments.rounds)
        return
    if arguments.memory_of:
        use_memory(arguments.memory_of)
        return
    if arguments.memory:
        results: list[Any] = report_memory()
    else:
        results = [report(name, kind, arguments) for name in arguments.models for kind in arguments.controllers]
    write(arguments, results)


if __name__ == "__main__":
    main()
