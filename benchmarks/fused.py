"""The fused updates, normalization and loss of hvdtrain beside what Keras writes, both in turn.

    python benchmarks/fused.py --rounds 15 --out results.json

One process on one thread updates 12.6 million parameters in thirty matrices by dense gradients, and a table of 12.8
million by the sparse gradient of 3,000 rows; it normalizes 32 images of 32 x 32 x 16 in training, forward and
backward, ten times over; and it forms the cross-entropy of 512 labels out of 8,192 classes and its gradient. Reported
are medians of processor time, which other work on the machine disturbs least, and the ratio of the medians.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.bench.script import Script, print_times
from hvdtrain.bench.timing import in_turn
from hvdtrain.layers.fused_batch_norm import fused_normalization, fusible_layers
from hvdtrain.optim.fused import fused_updates
from hvdtrain.training.step.cross_entropy import sparse_cross_entropy

MATRICES = [(512, 512)] * 24 + [(512, 2048)] * 3 + [(2048, 512)] * 3
TABLE = (200_000, 64)
ROWS = 3000
IMAGES = (32, 32, 32, 16)
LAYERS = 10
LOGITS = (512, 8192)
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


def normalization(*, fused: bool) -> Callable[[], Any]:
    """Return forward and backward pass of new layers, one after another."""
    layers = [keras.layers.BatchNormalization() for _ in range(LAYERS)]
    for layer in layers:
        layer.build(IMAGES)
    images = tf.Variable(np.random.default_rng(0).standard_normal(IMAGES, "float32"))
    used = [taken for layer in layers for taken in fusible_layers(layer)] if fused else []

    def passes() -> tf.Tensor:
        with fused_normalization(used), tf.GradientTape() as tape:
            outputs = images.read_value()
            tape.watch(first := outputs)
            for layer in layers:
                outputs = layer(outputs, training=True)
        return tf.reduce_max(tape.gradient(outputs, first))

    return tf.function(passes)


def cross_entropy(*, fused: bool) -> Callable[[], Any]:
    """Return forward and backward pass of the loss of a language model's logits."""
    random = np.random.default_rng(0)
    logits = tf.Variable(random.standard_normal(LOGITS, "float32"))
    labels = tf.constant(random.integers(0, LOGITS[1], LOGITS[:1]))
    written_out = keras.losses.SparseCategoricalCrossentropy(from_logits=True).call
    loss = sparse_cross_entropy if fused else written_out

    def passes() -> tf.Tensor:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(loss(labels, logits.read_value()))
        return tape.gradient(total, logits)

    return tf.function(passes)


def compare(script: Script, what: str, sides: dict[str, Callable[[], Any]], rounds: int) -> None:
    """Let the sides take turns, and print and record their milliseconds of processor time."""

    def milliseconds(run: Callable[[], Any]) -> float:
        begin = time.process_time()
        run()
        return 1000.0 * (time.process_time() - begin)

    calls = {side: partial(milliseconds, run) for side, run in sides.items()}
    counted = in_turn(calls, rounds, lambda value: [value], warm_up=WARM_UP)
    medians = {side: float(np.median(values)) for side, values in counted.items()}
    print_times(f"{what:26}", counted, "keras", {"fused": f"{medians['keras'] / medians['fused']:.2f}x as fast"})
    script.record(what, {}, {f"{side}_ms": values for side, values in counted.items()})


def main() -> int:
    script = Script(__doc__, rounds=15)
    options = script.parsed()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    ways = {"keras": False, "fused": True}
    for kind in ("dense", "sparse"):
        for name in OPTIMIZERS:
            sides = {side: update(name, kind, fused=fused) for side, fused in ways.items()}
            compare(script, f"{name}, {kind}", sides, options.rounds)
    for name, both_passes in (("batch normalization", normalization), ("cross-entropy", cross_entropy)):
        sides = {side: both_passes(fused=fused) for side, fused in ways.items()}
        compare(script, name, sides, options.rounds)
    return script.exit_code()


if __name__ == "__main__":
    sys.exit(main())
