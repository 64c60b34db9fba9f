"""What the options of the step cost: accumulation, precision, compression and update rules, in turn in one run.

    python benchmarks/options.py --models mlp lm --controllers mpirun gloo --rounds 7
    python benchmarks/options.py --rules --models mlp lm --optimizers adam sgd

One launch for each model, optimizer and controller. In it the variants take turns, a window of a few steps each, so
that they see the same machine:

    plain         Horovod's own tape in a hand-written loop, one microbatch on each rank
    alone         one microbatch without any exchange: the floor
    accumulate=K  K of these microbatches and one exchange
    precision, compression: one microbatch, as in `plain`, with that option
    metrics       one microbatch, with the accuracy counted in each step, as `fit` does
    zero=S, local_steps=N: with --rules, one microbatch and that update rule, against the all-reduce (`accumulate=1`);
                  of `tables` and `dlrm`, update=hybrid and the ways to reduce rows

All are given hvdtrain's settings of the exchange. A window's time is that of the slowest rank; reported are medians
over the rounds, per microbatch, their ratios to `plain` or to the all-reduce in the same round, and the bytes that a
rank holds beside the weights (`memory.py` has the peaks). Nothing else may run on the machine meanwhile.

    python benchmarks/options.py --memory

prints the peak memory of one process with and without accumulation and recomputation, each in a process of its own.
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, print_times, started
from hvdtrain.bench.timing import in_turn, peak_rss_mib, window

MODELS = {
    "mlp": ("mlp", {"depth": 4, "width": 3072}, (32, 32, 3), 10, 32),
    "lm": ("transformer", {"depth": 6, "width": 320, "heads": 5}, (128,), 8192, 4),
    "resnet20": ("resnet", {}, (32, 32, 3), 10, 32),
    "tables": ("", {"rows": 400_000, "width": 32}, (16,), 2, 256),
    "dlrm": ("dlrm", {"rows": 100_000}, {"numeric": (13,), "categorical": (26,)}, 2, 256),
}
"""Family, its arguments, shape of a sample, classes, samples of a microbatch on each rank."""
WITH_TABLES = ("tables", "dlrm")
"""Rows are looked up by Zipf's law: 16 a sample in one table, or one in each of 26."""
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
RULES: dict[str, dict[str, Any]] = {
    "zero=1": {"zero": 1},
    "zero=2": {"zero": 2},
    "zero=3": {"zero": 3},
    "zero=3, prefetch=1": {"zero": 3, "zero_prefetch": 1},
    "local_steps=4": {"local_steps": 4},
    "local_steps=16": {"local_steps": 16},
}
"""Further variants."""
TABLE_RULES: dict[str, dict[str, Any]] = {
    "update=hybrid": {"update": "hybrid"},
    "update=hybrid, ahead": {"update": "hybrid", "pull_ahead": True},
    "sparse_gradients=gather": {"sparse_gradients": "gather"},
    "sparse_gradients=dense": {"sparse_gradients": "dense"},
}
"""In their place for models with tables."""
OPTIMIZERS = {"sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {})}
MEMORY: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {}),
    "mlp accumulate=4": ("mlp", {"accumulate": 4}),
    "lm": ("lm", {}),
    "lm recompute": ("lm", {"recompute": True}),
    "resnet20": ("resnet20", {}),
    "resnet20 recompute": ("resnet20", {"recompute": True}),
}
CHOICES = VARIANTS | RULES | TABLE_RULES
MEMORY_BATCH = {"mlp": 32, "lm": 32, "resnet20": 512}


def samples(name: str, count: int) -> tuple[Any, np.ndarray]:
    _, arguments, shape, classes, _ = MODELS[name]
    rng = np.random.default_rng(0)
    if name == "lm":
        tokens = rng.integers(0, classes, (count, shape[0] + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]
    if name in WITH_TABLES:
        fields = shape["categorical"] if name == "dlrm" else shape
        ids = ((rng.zipf(1.05, (count, *fields)) - 1) % arguments["rows"]).astype(np.int32)
        labels = rng.integers(0, classes, count)
        if name == "tables":
            return ids, labels
        return {
            "numeric": rng.standard_normal((count, *shape["numeric"]), dtype=np.float32),
            "categorical": ids,
        }, labels
    return rng.standard_normal((count, *shape), dtype=np.float32), rng.integers(0, classes, count, dtype=np.int32)


def build(name: str) -> Any:
    from hvdtrain.config.model import ModelConfig
    from hvdtrain.models.registry import build_model

    family, arguments, shape, classes, _ = MODELS[name]
    if name == "tables":
        import keras

        layers = keras.layers
        table = layers.Embedding(arguments["rows"], arguments["width"])
        above = [layers.Flatten(), layers.Dense(256, "relu"), layers.Dense(classes)]
        return keras.Sequential([keras.Input(shape, dtype="int32"), table, *above])
    return build_model(ModelConfig(family, arguments), shape, classes, 0)


def loss_of(name: str) -> Any:
    import keras

    kind = keras.losses.BinaryCrossentropy if name == "dlrm" else keras.losses.SparseCategoricalCrossentropy
    return kind(from_logits=True)


def plain(name: str) -> Callable[[], Any]:
    """Return the step of a hand-written loop, as Horovod's documentation has it."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from hvdtrain.bench.plain import plain_step

    model, optimizer = build(name), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    step = plain_step(model, optimizer, loss_of(name), hvd.DistributedGradientTape)
    x, y = tf.nest.map_structure(tf.constant, samples(name, MODELS[name][4]))
    return lambda: step(x, y)


def ours(name: str, backend: Any, microbatch: int, options: dict[str, Any], optimizer: Any = None) -> Any:
    """Return hvdtrain's step, whose `rule` holds its slots."""
    import keras

    import hvdtrain
    from hvdtrain.training.inputs import training_data

    made = optimizer or keras.optimizers.SGD(0.01)
    trainer = hvdtrain.Trainer(lambda: build(name), made, loss_of(name), backend=backend, **options)
    count = microbatch * trainer.options.accumulate * backend.size
    data = training_data(samples(name, count), backend, batch=count, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    trainer.broadcast_state()
    compiled, batch = trainer.compiled_step(data), next(iter(data.batches(0)))

    def step() -> Any:
        return compiled(batch, measure=False).totals

    step.rule = trainer.rule  # type: ignore[attr-defined]
    return step


def held_bytes(rule: Any) -> int:
    """Return what this rank keeps beside the weights."""
    tensors = [tensor.value for path, tensor in rule.named_tensors().items() if not path.startswith("model/")]
    return sum(int(np.prod(tensor.shape)) * tensor.dtype.size for tensor in tensors)


def measure(model: str, variants: list[str], optimizer: str, steps: int, rounds: int) -> dict[str, Any]:
    """Return each variant's windows in milliseconds a step, those of the slowest rank, and the bytes of its slots."""
    backend, alone, gather = started()
    import keras

    kind, arguments = OPTIMIZERS[optimizer]
    runs = {}
    for name in variants:
        made = getattr(keras.optimizers, kind)(1e-4, **arguments)
        here = alone if name == "alone" else backend
        runs[name] = plain(model) if name == "plain" else ours(model, here, MODELS[model][4], CHOICES[name], made)
    sides = {variant: partial(window, step, steps) for variant, step in runs.items()}
    held = {variant: held_bytes(step.rule) for variant, step in runs.items() if variant != "plain"}
    return {"ms": in_turn(sides, rounds, gather), "slot_bytes": held}


def use_memory(variant: str) -> dict[str, Any]:
    """Take a few steps in this process and return its peak resident memory."""
    _, alone, _ = started()
    name, options = MEMORY[variant]
    accumulate = options.get("accumulate", 1)
    step = ours(name, alone, MEMORY_BATCH[name] // accumulate, options)
    for _ in range(4):
        step().numpy()
    windows = [window(step, 3) for _ in range(5)]
    parameters = build(name).count_params() * 4 / 2**20
    return {"peak_mib": peak_rss_mib(), "parameters_mib": parameters, "windows_ms": windows}


def print_variants(title: str, times: dict[str, list[float]], held: dict[str, float], base: str, samples: int) -> None:
    """Print a line for each variant, with its times per microbatch; `samples` is that of all ranks."""
    counts = {variant: CHOICES.get(variant, {}).get("accumulate", 1) for variant in times}
    each = {variant: [value / counts[variant] for value in values] for variant, values in times.items()}
    notes = {variant: f"{size / 2**20:7.1f} MiB of slots" for variant, size in held.items()}
    if "alone" in each:
        for variant, values in each.items():
            over = 1000.0 * (np.median(values) - np.median(each["alone"])) / samples
            notes[variant] = f"{notes.get(variant, '')}   over alone {over:8.1f} us a sample"
    print_times(f"{title}  per microbatch", each, base, notes)


def main() -> int:
    script = Script(__doc__, measure, use_memory, rounds=7, ranks=2)
    script.add_argument("--models", nargs="+", choices=tuple(MODELS), default=["mlp", "lm", "resnet20"])
    script.add_argument(
        "--variants",
        nargs="+",
        choices=("plain", *CHOICES),
        default=["plain", *(name for name in VARIANTS if name != "precision=mixed_float16")],
        help="fp16, which CPUs compute hundreds of times as slowly, must be asked for",
    )
    script.add_argument("--rules", action="store_true", help="measure the update rules instead")
    script.add_argument("--optimizers", nargs="+", choices=tuple(OPTIMIZERS), default=["sgd"])
    script.add_argument("--steps", type=int, help="steps of a window (4; with --rules 16)")
    script.add_argument("--memory", action="store_true", help="measure memory instead of time")
    options = script.parsed()
    if options.memory:
        for run in script.measure([script.job(name, use_memory, variant=name) for name in MEMORY]):
            peak, parameters = run.figure("peak_mib")[0], run.figure("parameters_mib")[0]
            print(f"{run.name:20} peak {peak:7.0f} MiB   parameters {parameters:6.1f} MiB")
        return script.exit_code()
    base = "accumulate=1" if options.rules else "plain"
    given = {"steps": options.steps or (16 if options.rules else 4), "rounds": options.rounds}
    for name, optimizer, controller in product(options.models, options.optimizers, options.controllers):
        rules = TABLE_RULES if name in WITH_TABLES else RULES
        variants = ["accumulate=1", *rules, "alone"] if options.rules else options.variants
        given |= {"model": name, "optimizer": optimizer, "variants": variants}
        job = script.job("in turn", measure, controller=controller, ranks=options.ranks, **given)
        for run in script.measure([job]):
            title, samples = f"{name:9} {optimizer:9} {controller:6}", MODELS[name][4] * options.ranks
            print_variants(title, run.figure("ms")[0], run.figure("slot_bytes")[0], base, samples)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
