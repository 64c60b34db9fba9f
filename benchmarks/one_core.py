"""Keras' fit in a process that has one core, with and without a session of hvdtrain.

    python benchmarks/one_core.py --rounds 3 --out results.json

Both sides train the same model on the same arrays, in fresh processes that take turns on one core, and evaluate it
after each epoch. Keras makes an iterator of tf.data for each of these passes. What a side takes longer than its
processor time it waits, for tf.data's tuning thread to end. Reported are medians. Nothing else may run on the machine
meanwhile.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from harness import printed, write

WORD = "ONE-CORE"
SAMPLES = 60_000
LIMIT_S = 600


def train(side: str, epochs: int) -> None:
    """Print the seconds that a training takes, and those of the processor."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
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
    figures = {"wall_s": time.perf_counter() - wall, "processor_s": time.process_time() - processor}
    print(WORD, json.dumps(figures), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--side", choices=["keras", "hvdtrain"], help="one launch of one side")
    parser.add_argument("--out", type=Path, help="write the figures with their settings to this JSON file")
    arguments = parser.parse_args()
    if arguments.side is not None:
        train(arguments.side, arguments.epochs)
        return
    rounds: dict[str, list[dict[str, float]]] = {"keras": [], "hvdtrain": []}
    for number in range(arguments.rounds):
        for side in rounds if number % 2 == 0 else reversed(rounds):
            command = [sys.executable, __file__, "--side", side, "--epochs", str(arguments.epochs)]
            rounds[side].append(printed(command, WORD, limit_s=LIMIT_S))
            print(f"round {number + 1}  {side:9} {rounds[side][-1]}", flush=True)
    medians = {side: float(np.median([each["wall_s"] for each in taken])) for side, taken in rounds.items()}
    ratio = medians["hvdtrain"] / medians["keras"]
    print(f"keras {medians['keras']:.1f} s  hvdtrain {medians['hvdtrain']:.1f} s  ratio {ratio:.2f}")
    write(arguments, {"rounds": rounds, "ratio": ratio})


if __name__ == "__main__":
    main()
