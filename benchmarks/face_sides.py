"""One run of the comparison of `fit` with a plain loop; rank 0 prints the times of both sides' windows as JSON.

Both sides train the same model on the same data in the same processes, a window of ten steps of one after one of the
other: `model.fit` with `hvdtrain.horovod.keras.DistributedOptimizer`, and Horovod's documented loop with its own tape.
"""

import argparse
import json
import time
from collections.abc import Iterator
from typing import Any

import keras
from sides import MODELS, WARM_UP, WINDOW

import hvdtrain.horovod.keras as hvd
from hvdtrain.bench.catalog import bench_config
from hvdtrain.bench.plain import PlainLoop, pin, window_of
from hvdtrain.config.run import Config
from hvdtrain.models.registry import model_family
from hvdtrain.runtime.launchers import detect_environment


class TakingTurns(keras.callbacks.Callback):
    """Times each window of `fit`, and then lets the plain loop take one."""

    def __init__(self, plain: Iterator[None]) -> None:
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
            self.times["plain"].append(window_of(self._plain, WINDOW))


def measure(config: Config, windows: int) -> dict[str, list[float]]:
    """Return each side's windows in milliseconds a step, without those in which something is traced."""
    environment = detect_environment()
    pin(environment)
    hvd.init()
    plain, face = PlainLoop(config, environment), PlainLoop(config, environment)
    face.model.compile(hvd.DistributedOptimizer(face.optimizer), model_family(config.model).loss())
    turns = TakingTurns(plain.steps(WINDOW))
    start_alike = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    face.model.fit(face.batches(), steps_per_epoch=windows * WINDOW, verbose=0, callbacks=[start_alike, turns])
    return {side: values[WARM_UP:] for side, values in turns.times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--windows", type=int, default=24)
    arguments = parser.parse_args()
    times = measure(bench_config(arguments.model, batch=arguments.batch), arguments.windows)
    if hvd.rank() == 0:
        print("WINDOWS " + json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
