"""Keras' fit in a process that has one core, with and without a session of hvdtrain.

    python benchmarks/one_core.py --rounds 3 --out results.json

Both sides train the same model on the same arrays, in fresh processes that take turns on one core, and evaluate it
after each epoch. Keras makes an iterator of tf.data for each of these passes. What a side takes longer than its
processor time it waits, for tf.data's tuning thread to end. Reported are medians. Nothing else may run on the machine
meanwhile.
"""

import sys
import time
from typing import Any

import numpy as np

from hvdtrain.bench.script import Script, print_times
from hvdtrain.bench.timing import limit_cores

SAMPLES = 60_000


def train(side: str, epochs: int) -> dict[str, Any]:
    """Return the milliseconds that a training takes, and those of the processor."""
    limit_cores(1)
    if side == "hvdtrain":
        import hvdtrain

        hvdtrain.init()
    import keras

    random = np.random.default_rng(0)
    x, y = random.standard_normal((SAMPLES, 512), "float32"), random.integers(0, 10, SAMPLES)
    model = keras.Sequential([keras.Input((512,)), keras.layers.Dense(512, activation="relu"), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    wall, processor = time.perf_counter(), time.process_time()
    model.fit(x, y, batch_size=8, epochs=epochs, validation_data=(x[:6000], y[:6000]), verbose=0)
    return {"ms": 1000.0 * (time.perf_counter() - wall), "cpu_ms": 1000.0 * (time.process_time() - processor)}


def main() -> int:
    script = Script(__doc__, train, rounds=3)
    script.add_argument("--epochs", type=int, default=3)
    options = script.parsed()
    jobs = [script.job(side, train, side=side, epochs=options.epochs) for side in ("keras", "hvdtrain")]
    runs = script.measure(jobs, options.rounds, limit_s=600)
    print_times("fit on one core", {run.name: run.medians("ms") for run in runs}, "keras")
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
