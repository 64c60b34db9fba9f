"""One run of the comparison of `fit` with a plain loop; rank 0 prints the times of both sides' windows as JSON.

Both sides train the same model on the same data in the same processes, a window of ten steps of one after one of the
other: `model.fit` with `hvdtrain.horovod.keras.DistributedOptimizer`, and Horovod's documented loop with its own tape.
"""

import argparse
import json
import time
from typing import Any

import keras
import tensorflow as tf
from sides import MODELS, WARM_UP, WINDOW, build, pinned, plain_steps, samples, window_of

import hvdtrain.horovod.keras as hvd
from hvdtrain.runtime.environment import detect_environment


class TakingTurns(keras.callbacks.Callback):
    """Times each window of `fit`, and then lets the plain loop take one."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.times: dict[str, list[float]] = {"plain": [], "face": []}
        self._plain = plain
        self._begin = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch % WINDOW == 0:
            self._begin = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if (batch + 1) % WINDOW == 0:
            self.times["face"].append(1000.0 * (time.perf_counter() - self._begin) / WINDOW)
            self.times["plain"].append(window_of(self._plain))


def measure(name: str, batch: int, windows: int) -> dict[str, list[float]]:
    """Return each side's windows in milliseconds a step, without those in which something is traced."""
    environment = detect_environment()
    threads = pinned(environment.local_rank, environment.local_size)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    hvd.init()
    model, optimizer, loss = build(name)
    model.compile(hvd.DistributedOptimizer(optimizer), loss)
    dataset = tf.data.Dataset.from_tensor_slices(samples(name))
    dataset = dataset.repeat().shuffle(10000).batch(batch // environment.size).prefetch(4)
    turns = TakingTurns(plain_steps(name, batch, environment))
    start_alike = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(dataset, steps_per_epoch=windows * WINDOW, verbose=0, callbacks=[start_alike, turns])
    return {side: values[WARM_UP:] for side, values in turns.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--windows", type=int, default=24)
    arguments = parser.parse_args()
    times = measure(arguments.model, arguments.batch, arguments.windows)
    if hvd.rank() == 0:
        print("WINDOWS " + json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
