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

import sys
import time
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script
from hvdtrain.runtime.launchers import detect_environment

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2}
"""Stages on each rank, by schedule."""
LENGTH, VOCABULARY, SAMPLES = 128, 8192, 4
"""Tokens of a sequence, and sequences of a microbatch, of the transformer."""
WARM_UP = 3
"""Steps that are not counted, of which the first compiles."""


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


def measure(stage_s: float, steps: int, counts: list[int]) -> dict[str, Any]:
    """Return the median step in milliseconds of each schedule and number of microbatches."""
    import hvdtrain

    hvdtrain.init(parallel="pp=-1")
    ranks = detect_environment().size
    found = {}
    for schedule in CHUNKS:
        for count in counts:
            if schedule != "interleaved" or count % ranks == 0:
                seconds = np.median(trained(stage_s, schedule, count, ranks, steps))
                found[f"{schedule} {count}"] = 1e3 * float(seconds)
    return {"ms": found}


def print_schedule(title: str, schedule: Any, times: dict[int, float], stage_s: float, ranks: int) -> None:
    """Print a line for each number of microbatches."""
    from hvdtrain.parallel.pipeline.schedule import ideal_bubble, messages_in_turn, schedule_of

    chunks, each = CHUNKS[schedule], 1e3 * stage_s
    if not stage_s:
        each = float(np.polyfit(list(times), list(times.values()), 1)[0]) if len(times) > 1 else float("nan")
    for count, milliseconds in times.items():
        schedules = [schedule_of(schedule, rank, ranks, count, chunks) for rank in range(ranks)]
        waits = messages_in_turn(schedules, lambda action: 1.0 if action.kind == "forward" else 2.0, ranks * chunks)
        print(
            f"{title} {ranks} ranks {schedule:11} {count:3} microbatches {milliseconds:8.1f} ms   "
            f"idle {100 * (1 - count * each / milliseconds):5.1f} %   "
            f"formula {100 * ideal_bubble(ranks, count, chunks):5.1f} %   waits for {waits}",
            flush=True,
        )


def main() -> int:
    script = Script(__doc__, measure)
    script.add_argument("--stages", choices=("simulated", "lm"), default="simulated")
    script.add_argument("--stage-ms", type=float, default=60, help="time of a rank's stages for one microbatch")
    script.add_argument("--ranks", type=int, choices=(2, 4), default=2)
    script.add_argument("--controllers", nargs="+", choices=["mpirun", "gloo"], default=["mpirun", "gloo"])
    script.add_argument("--microbatches", nargs="+", type=int, default=[2, 4, 8])
    script.add_argument("--steps", type=int, default=10)
    options = script.parsed()
    stage_s = 0.0 if options.stages == "lm" else options.stage_ms / 1e3
    for controller in options.controllers:
        given = {"stage_s": stage_s, "steps": options.steps, "counts": options.microbatches}
        for run in script.measure(
            [script.job("pipeline", measure, controller=controller, ranks=options.ranks, **given)]
        ):
            found = {tuple(name.split()): milliseconds for name, milliseconds in run.figure("ms")[0].items()}
            for schedule in CHUNKS:
                times = {int(count): ms for (kind, count), ms in found.items() if kind == schedule}
                print_schedule(f"{options.stages} {controller:6}", schedule, times, stage_s, options.ranks)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
