"""One run of the step-time comparison; rank 0 prints the times of its windows of steps as JSON.

Runs:
    plain     a hand-written loop as Horovod's documentation has it, at Horovod's own settings
    hvdtrain  `hvdtrain.Trainer` on the same model, data, batch and optimizer
    paired    both in the same processes, a window of one after a window of the other: the plain loop has hvdtrain's
              settings of the exchange then, and where there is one process it has no Horovod at all

All of them are pinned alike: one block of cores and as many threads for each rank. Every window has one logged step.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

MODELS = {"digits": ("small_cnn", 8, 1, 1437), "resnet20": ("resnet", 32, 3, 2048)}
WINDOW = 10
WARM_UP = 4


def pinned(rank: int, size: int) -> int:
    """Give this rank its block of cores, as hvdtrain does, and return their number."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // size
    if share == 0:
        return 1
    os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share])
    return share


def samples(name: str) -> tuple[np.ndarray, np.ndarray]:
    _, size, channels, count = MODELS[name]
    rng = np.random.default_rng(0)
    images = rng.standard_normal((count, size, size, channels), dtype=np.float32)
    return images, rng.integers(0, 10, count, dtype=np.int32)


def build(name: str) -> tuple[Any, Any, Any]:
    import keras

    from hvdtrain.config.model import ModelConfig
    from hvdtrain.models.registry import build_model

    family, size, channels, _ = MODELS[name]
    model = build_model(ModelConfig(family), (size, size, channels), 10, 0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, keras.optimizers.SGD(0.01, momentum=0.9), loss


def pin_and_start(environment: Any) -> None:
    """Do for the plain loop what `hvdtrain.init` does for the other."""
    threads = pinned(environment.local_rank, environment.local_size)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    if environment.size > 1:
        import horovod.tensorflow as hvd

        hvd.init()


def plain_steps(name: str, batch: int, environment: Any) -> Iterator[None]:
    """Horovod's documented TensorFlow 2 loop on today's Keras, step by step; alone without Horovod."""
    import tensorflow as tf

    model, optimizer, loss = build(name)
    images, labels = samples(name)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.repeat().shuffle(10000).batch(batch // environment.size).prefetch(4)
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    reduced: Callable[[tf.GradientTape], Any] = lambda tape: tape  # noqa: E731
    if environment.size > 1:
        import horovod.tensorflow as hvd

        reduced = hvd.DistributedGradientTape
        hvd.broadcast_variables([v.value for v in model.variables + optimizer.variables], root_rank=0)

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        gradients = reduced(tape).gradient(value, variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    for step, (x, y) in enumerate(dataset):
        value = training_step(x, y)
        if step % WINDOW == 0 and environment.rank == 0:
            print(f"step {step} loss {float(value):.4f}", file=sys.stderr)
        yield


def window_of(steps: Iterator[None]) -> float:
    """Take a window's steps and return the milliseconds that one took."""
    begin = time.perf_counter()
    for _ in range(WINDOW):
        next(steps)
    return 1000.0 * (time.perf_counter() - begin) / WINDOW


def with_hvdtrain(name: str, batch: int, windows: int, beside: Callable[[], None] | None = None) -> list[float]:
    """Train with `hvdtrain.Trainer`; `beside` is called between two windows and is not timed."""
    import hvdtrain
    from hvdtrain.observability.events import BaseObserver
    from hvdtrain.training.inputs import training_data
    from hvdtrain.training.loop import Plan

    times: list[float] = []

    class Stopwatch(BaseObserver):
        begin = time.perf_counter()

        def on_progress(self, step: int) -> None:
            if step % WINDOW == 0:
                times.append(1000.0 * (time.perf_counter() - self.begin) / WINDOW)
                if beside is not None:
                    beside()
                self.begin = time.perf_counter()

    model, optimizer, loss = build(name)
    trainer = hvdtrain.Trainer(model, optimizer, loss, ["accuracy"])
    data = training_data(samples(name), trainer.backend, batch=batch, seed=0, shuffle=True, steps_per_epoch=None)
    trainer.build(data)
    trainer.train(data, Plan(windows * WINDOW, WINDOW), observers=Stopwatch())
    return times


def measure(run: str, name: str, batch: int, windows: int) -> dict[str, list[float]]:
    """Return each side's windows in milliseconds a step, without those in which something is traced."""
    from hvdtrain.runtime.environment import detect_environment

    times: dict[str, list[float]] = {"plain": [], "hvdtrain": []}
    environment = detect_environment()
    if run == "plain":
        pin_and_start(environment)
        steps = plain_steps(name, batch, environment)
        times["plain"] = [window_of(steps) for _ in range(windows)]
    else:
        import hvdtrain

        hvdtrain.init()
        steps = plain_steps(name, batch, environment)
        beside = (lambda: times["plain"].append(window_of(steps))) if run == "paired" else None
        times["hvdtrain"] = with_hvdtrain(name, batch, windows, beside)
    return {side: values[WARM_UP:] for side, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", choices=("plain", "hvdtrain", "paired"))
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--windows", type=int, default=12)
    arguments = parser.parse_args()
    times = measure(arguments.run, arguments.model, arguments.batch, arguments.windows)
    from hvdtrain.runtime.environment import detect_environment

    if detect_environment().rank == 0:
        print("WINDOWS " + json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
