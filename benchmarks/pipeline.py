"""How long the ranks of a pipeline are idle, beside (p - 1) / (v m + p - 1).

    python benchmarks/pipeline.py --ranks 2 --stages simulated
    python benchmarks/pipeline.py --ranks 2 --stages lm --microbatches 2 4 8

Stages are `simulated` by layers that sleep --stage-ms, a third of it forward and the rest backward (an interleaved
rank's stages share this time), or are those of a transformer of 13 million parameters. A step of m microbatches takes
the time of m + (p - 1) / v of them in a pipeline of p ranks with v stages on each. Reported are, for each schedule and
m,

    ms      the median step
    idle    1 - m u / step, where u is the time of one microbatch: known of simulated stages, and of a transformer the
            slope of a line through the steps of all m, of microbatches of one size
    formula the idle share by the schedule, with messages that take no time
    waits   messages that a step waits for, one after another; those of an interleaved pipeline are the most

On a transformer the line's slope holds the exchange between stages, too, and its offset what a step takes besides its
microbatches: the update. Nothing else may run meanwhile.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import launcher, printed, write

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages on each rank, by schedule."""
LENGTH, VOCABULARY, SAMPLES = 128, 8192, 4
"""Tokens of a sequence, and sequences of a microbatch, of the transformer."""
WARM_UP = 3
"""Steps that are not counted, of which the first compiles."""
LIMIT_S = 900


def sleeping(seconds: float) -> Any:
    """Return a layer that takes `seconds`, a third of them forward and the rest backward, and passes its input on."""
    import keras
    import tensorflow as tf

    def after(x: tf.Tensor, pause: float) -> tf.Tensor:
        def wait(value: Any) -> Any:
            time.sleep(pause)
            return value

        return tf.ensure_shape(tf.numpy_function(wait, [x], x.dtype), x.shape)

    @tf.custom_gradient
    def passed(x: tf.Tensor) -> Any:
        return after(x, seconds / 3), lambda dy: after(dy, 2 * seconds / 3)

    class Sleeping(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return passed(x)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    return Sleeping()


def simulated(stages: int, seconds: float) -> Any:
    """Return a model of so many stages, each a layer with a few weights and one that sleeps `seconds`."""
    import keras

    layers = [keras.layers.Dense(4), sleeping(seconds)]
    for _ in range(stages - 1):
        layers += [keras.layers.Dense(4), sleeping(seconds)]
    return keras.Sequential([keras.Input((4,)), *layers])


def trained(stage_s: float, schedule: str, microbatches: int, ranks: int, steps: int) -> list[float]:
    """Return the seconds of `steps` steps on this rank's stages, simulated ones of `stage_s` unless that is 0."""
    import keras

    import hvdtrain
    from hvdtrain.models.transformer import build

    chunks = CHUNKS[schedule]
    rng = np.random.default_rng(0)
    batch = microbatches * (1 if stage_s else SAMPLES)
    samples = batch * (steps + WARM_UP)
    if stage_s:
        names = tuple(f"stage{number}" for number in range(1, ranks * chunks))
        model = named(simulated(ranks * chunks, stage_s / chunks), names)
        x, y, loss = rng.random((samples, 4), "float32"), np.zeros((samples, 4), "float32"), "mse"
    else:
        names = ()
        model = build((LENGTH,), VOCABULARY, 0)
        x = rng.integers(0, VOCABULARY, (samples, LENGTH)).astype("int32")
        y, loss = x, keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    seconds: list[float] = []
    trainer = hvdtrain.Trainer(
        model, "adam", loss, accumulate=microbatches, pipeline_schedule=schedule, virtual_stages=chunks,
        pipeline_stages=names,
    )  # fmt: skip
    trainer.fit(x, y, batch=batch, callbacks=[clock(seconds)], verbose=0, log_every=1)
    return seconds[WARM_UP:]


def named(model: Any, names: tuple[str, ...]) -> Any:
    """Return `model` rebuilt so that each stage but the first begins with a layer of one of the names."""
    import keras

    first = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    for layer, name in zip(first[1:], names, strict=True):
        layer.name = name
    return model


def clock(seconds: list[float]) -> Any:
    """Return a callback that notes how long each step took."""
    import keras

    class Clock(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.begin = time.perf_counter()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seconds.append(time.perf_counter() - self.begin)

    return Clock()


def train(words: list[str]) -> None:
    """Run on every rank of a launch; rank 0 prints what each of the schedules took."""
    import hvdtrain

    stage_s = float(words[0])
    ranks, steps, *counts = map(int, words[1:])
    hvdtrain.init(parallel=f"pp={ranks}")
    found = {}
    for schedule in CHUNKS:
        usable = [count for count in counts if schedule != "interleaved" or count % ranks == 0]
        found[schedule] = {count: float(np.median(trained(stage_s, schedule, count, ranks, steps))) for count in usable}
    if hvdtrain.rank() == 0:
        print("RUN " + json.dumps(found), flush=True)


def compare(controller: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one launch and print a line for each schedule and number of microbatches."""
    from hvdtrain.parallel.pipeline.schedule import ideal_bubble, messages_in_turn, schedule_of

    def waits(schedule: Any, count: int) -> int:
        chunks, ranks = CHUNKS[schedule], arguments.ranks
        schedules = [schedule_of(schedule, rank, ranks, count, chunks) for rank in range(ranks)]
        return messages_in_turn(schedules, lambda action: 1.0 if action.kind == "forward" else 2.0, ranks * chunks)

    stage_s = 0 if arguments.stages == "lm" else arguments.stage_ms / 1e3
    words = [str(stage_s), str(arguments.ranks), str(arguments.steps), *map(str, arguments.microbatches)]
    command = [*launcher(controller, arguments.ranks), sys.executable, __file__, "--train", *words]
    found: dict[str, dict[str, float]] = printed(command, "RUN", limit_s=LIMIT_S)
    rows = []
    for schedule, steps in found.items():
        times = {int(count): seconds for count, seconds in steps.items()}
        each = stage_s
        if arguments.stages == "lm":
            each = float(np.polyfit(list(times), list(times.values()), 1)[0]) if len(times) > 1 else float("nan")
        for count, seconds in times.items():
            idle, formula = 1 - count * each / seconds, ideal_bubble(arguments.ranks, count, CHUNKS[schedule])
            row = {"schedule": schedule, "microbatches": count, "s": seconds, "idle": idle, "formula": formula}
            rows.append({**row, "waits": waits(schedule, count)})
            print(
                f"{arguments.stages} {controller:6} {arguments.ranks} ranks {schedule:11} {count:3} microbatches "
                f"{1e3 * seconds:8.1f} ms   idle {100 * idle:5.1f} %   formula {100 * formula:5.1f} %   "
                f"waits for {waits(schedule, count)}",
                flush=True,
            )
    return {"controller": controller, "rows": rows}


def main() -> None:
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", choices=("simulated", "lm"), default="simulated")
    parser.add_argument("--stage-ms", type=float, default=60, help="time of a rank's stages for one microbatch")
    parser.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    parser.add_argument("--controllers", nargs="+", choices=["mpirun", "gloo"], default=["mpirun", "gloo"])
    parser.add_argument("--microbatches", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    arguments = parser.parse_args()
    write(arguments, [compare(controller, arguments) for controller in arguments.controllers])


if __name__ == "__main__":
    main()
