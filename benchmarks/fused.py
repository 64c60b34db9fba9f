"""The fused updates of `hvdtrain.optim.fused` beside the chains of ops that Keras writes, both in turn.

    python benchmarks/updates.py --rounds 15 --out results.json

One process on one thread updates 12.6 million parameters in thirty matrices by dense gradients, and a table of 12.8
million by the sparse gradient of 3,000 rows. Reported are medians of processor time, which other work on the machine
disturbs least, and the ratio of the medians.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from harness import write

from hvdtrain.optim.fused import fused_updates

MATRICES = [(512, 512)] * 24 + [(512, 2048)] * 3 + [(2048, 512)] * 3
TABLE = (200_000, 64)
ROWS = 3000
WARM_UP = 3
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "SGD with momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "SGD": lambda: keras.optimizers.SGD(0.1),
}


def gradients_of(kind: str) -> tuple[list[tuple[int, ...]], Callable[[], list[Any]]]:
    """Return the variables' shapes, and a function that gives their gradients."""
    random = np.random.default_rng(0)
    if kind == "dense":
        kept = [tf.Variable(random.standard_normal(shape, "float32")) for shape in MATRICES]
        return MATRICES, lambda: [gradient.read_value() for gradient in kept]
    rows = tf.constant(np.sort(random.choice(TABLE[0], ROWS, replace=False)))
    values = tf.Variable(random.standard_normal((ROWS, TABLE[1]), "float32"))
    return [TABLE], lambda: [tf.IndexedSlices(values.read_value(), rows, tf.constant(TABLE))]


def update(name: str, kind: str, *, fused: bool) -> Callable[[], Any]:
    """Return a compiled update of new variables."""
    shapes, gradients = gradients_of(kind)
    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = OPTIMIZERS[name]()
    optimizer.build(variables)

    def written_out() -> None:
        optimizer.apply(gradients(), variables)

    def in_one() -> None:
        with fused_updates(optimizer):
            written_out()

    return tf.function(in_one if fused else written_out)


def compare(name: str, kind: str, rounds: int) -> dict[str, Any]:
    """Let both take turns; return their times in milliseconds."""
    sides = {"keras": update(name, kind, fused=False), "fused": update(name, kind, fused=True)}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(WARM_UP + rounds):
        for side, run in sides.items():
            begin = time.process_time()
            run()
            times[side].append(1000.0 * (time.process_time() - begin))
    medians = {side: float(np.median(values[WARM_UP:])) for side, values in times.items()}
    ratio = medians["keras"] / medians["fused"]
    print(f"{name:18} {kind:7} keras {medians['keras']:7.1f} ms   fused {medians['fused']:7.1f} ms   {ratio:.2f}x")
    return {"optimizer": name, "gradient": kind, "ratio": ratio, "medians_ms": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    write(arguments, [compare(name, kind, arguments.rounds) for kind in ("dense", "sparse") for name in OPTIMIZERS])


if __name__ == "__main__":
    main()
