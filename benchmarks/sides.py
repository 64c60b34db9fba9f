"""One side of the step-time comparison, in processes of its own; rank 0 prints its step times as JSON.

Sides:
    plain     a hand-written loop as Horovod's documentation has it, at Horovod's own settings
    tuned     the same loop with the exchange settings that hvdtrain makes its defaults
    bare      the same loop in one process, without Horovod
    hvdtrain  `hvdtrain.Trainer` on the same model, data, batch and optimizer

All of them are pinned alike: one block of cores and as many threads for each rank.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

MODELS = {"digits": ("small_cnn", 8, 1, 1437), "resnet20": ("resnet", 32, 3, 2048)}
LOG_EVERY = 10


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


def hand_written(name: str, batch: int, steps: int, *, distributed: bool) -> list[float]:
    """Horovod's documented TensorFlow 2 loop, on today's Keras; or the same without Horovod."""
    from hvdtrain.runtime.environment import detect_environment

    environment = detect_environment()
    threads = pinned(environment.local_rank, environment.local_size)
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    model, optimizer, loss = build(name)
    images, labels = samples(name)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    dataset = dataset.repeat().shuffle(10000).batch(batch // environment.size).prefetch(4)
    variables = [variable.value for variable in model.trainable_variables]
    optimizer.build(model.trainable_variables)
    reduced: Callable[[tf.GradientTape], Any] = lambda tape: tape  # noqa: E731
    if distributed:
        import horovod.tensorflow as hvd

        hvd.init()
        reduced = hvd.DistributedGradientTape
        hvd.broadcast_variables([v.value for v in model.variables + optimizer.variables], root_rank=0)

    @tf.function
    def training_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, model(images, training=True))
        gradients = reduced(tape).gradient(value, variables)
        optimizer.apply(gradients, model.trainable_variables)
        return value

    ends = []
    for step, (x, y) in enumerate(dataset.take(steps)):
        value = training_step(x, y)
        ends.append(time.perf_counter())
        if step % LOG_EVERY == 0 and environment.rank == 0:
            print(f"step {step} loss {float(value):.4f}", file=sys.stderr)
    return ends


def with_hvdtrain(name: str, batch: int, steps: int) -> list[float]:
    import hvdtrain

    hvdtrain.init()
    from hvdtrain.observability.events import BaseObserver
    from hvdtrain.training.inputs import training_data
    from hvdtrain.training.loop import Plan

    ends: list[float] = []

    class Stopwatch(BaseObserver):
        def on_progress(self, step: int) -> None:
            ends.append(time.perf_counter())

    model, optimizer, loss = build(name)
    trainer = hvdtrain.Trainer(model, optimizer, loss, ["accuracy"])
    data = training_data(samples(name), trainer.backend, batch=batch, seed=0, shuffle=True, steps_per_epoch=None)
    trainer.build(data)
    trainer.train(data, Plan(steps, LOG_EVERY), observers=Stopwatch())
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", choices=("plain", "tuned", "bare", "hvdtrain"))
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=120)
    arguments = parser.parse_args()
    if arguments.side == "tuned":
        from hvdtrain.runtime.tuning import set_exchange_defaults

        set_exchange_defaults(os.environ)
    if arguments.side == "hvdtrain":
        ends = with_hvdtrain(arguments.model, arguments.batch, arguments.steps)
    else:
        distributed = arguments.side != "bare"
        ends = hand_written(arguments.model, arguments.batch, arguments.steps, distributed=distributed)
    from hvdtrain.runtime.environment import detect_environment

    if detect_environment().rank == 0:
        print("ENDS " + json.dumps(ends), flush=True)


if __name__ == "__main__":
    main()
