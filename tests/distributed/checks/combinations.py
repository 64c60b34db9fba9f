"""Options of the step together: normalization over all ranks, accumulation, recomputation and 16-bit layers."""

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, per_sample
from keras import layers
from world import World, computing_in, flat_bytes, grappler, moved, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.data.batch import split_bounds
from hvdtrain.optim.precision import precision

SAMPLES, BATCH, EPOCHS = 39, 16, 7  # two full batches and one of 7 samples: 21 steps
# One launch runs many checks: of all combinations, those in which every two options meet.
IN_64_BITS = [{"accumulate": 1, "recompute": False}, {"accumulate": 2, "recompute": True}]
IN_16_BITS = [
    ("mixed_float16", 2**-11, {"accumulate": 2, "recompute": False}),
    ("mixed_bfloat16", 2**-8, {"accumulate": 1, "recompute": True}),
]


def build(seed: int) -> keras.Model:
    """Return a model with statistics, long enough to be cut into segments; its layers take the policy of the day."""
    keras.utils.set_random_seed(seed)
    inputs = x = keras.Input((6,))
    for number in range(2):
        x = layers.Dense(8, use_bias=False, name=f"dense{number}")(x)
        x = layers.BatchNormalization(momentum=0.9, name=f"norm{number}")(x)
        x = layers.Activation("tanh", name=f"tanh{number}")(x)
    last = "float64" if keras.config.dtype_policy().name == "float64" else "float32"
    return keras.Model(inputs, layers.Dense(3, name="top", dtype=last)(x))


def data() -> tuple[np.ndarray, np.ndarray]:
    """Return samples whose mean drifts, so that no rank and no microbatch has the statistics of another."""
    rng = np.random.default_rng(21)
    drift = np.linspace(-1.0, 2.0, SAMPLES)[:, np.newaxis]
    return (rng.standard_normal((SAMPLES, 6)) + drift).astype("float32"), rng.integers(0, 3, SAMPLES)


def optimizer() -> Any:
    return keras.optimizers.SGD(0.0625, momentum=0.875)


def microbatches(total: int, size: int, accumulate: int) -> Iterator[list[int]]:
    """Which samples of a global batch go through the model at the same time, on all ranks together."""
    length = BATCH // size // accumulate
    parts = [range(*split_bounds(total, rank, size)) for rank in range(size)]
    for number in range(-(-max(map(len, parts)) // length)):
        yield [i for part in parts for i in part[number * length : (number + 1) * length]]


@functools.cache
def reference(policy: str, size: int, accumulate: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Train in one process, one microbatch of all ranks after the other; return the weights before and after."""
    with precision(policy):
        return _reference(size, accumulate)


def _reference(size: int, accumulate: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    (x, y), model, rule = data(), build(0), optimizer()
    start = [np.array(w) for w in model.get_weights()]
    rule.build(model.trainable_variables)
    variables = [v.value for v in model.trainable_variables]
    for first in [*range(0, SAMPLES, BATCH)] * EPOCHS:
        batch, labels = x[first : first + BATCH], y[first : first + BATCH]
        total = [tf.zeros_like(v) for v in variables]
        for rows in microbatches(len(batch), size, accumulate):
            with tf.GradientTape() as tape:
                losses = per_sample(labels[rows], model(batch[rows], training=True))
                loss = tf.reduce_sum(losses) / len(batch)
            total = [a + b for a, b in zip(total, tape.gradient(loss, variables), strict=True)]
        rule.apply(total, model.trainable_variables)
    return start, model.get_weights()


def trained(world: World, name: str, **options: Any) -> list[np.ndarray]:
    with precision(name):
        model = build(world.rank)
    trainer = hvdtrain.Trainer(
        model,
        optimizer(),
        CROSS_ENTROPY,
        backend=world.backend,
        sync_batch_norm=True,
        **options,
    )
    trainer.fit(data(), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, log_every=1)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), options
    return trainer.model.get_weights()


@worlds("mpirun-2", extended=True)
@grappler()
@computing_in("float64")
def check_synchronized_accumulated_and_recomputed_in_float64(world: World) -> None:
    """Weights and moving statistics are those of one process."""
    for options in IN_64_BITS:
        start, expected = reference("float64", world.size, options["accumulate"])
        assert moved(expected, start) > 1e-2
        error = relative_error(trained(world, "float64", **options), expected)
        assert error < 1e-9, (options, error)


@worlds("mpirun-2", extended=True)
def check_synchronized_accumulated_and_recomputed_in_16_bits(world: World) -> None:
    """Layers that compute in 16 bits stay near those in 32, with statistics and weights in 32."""
    for name, unit, options in IN_16_BITS:
        exact = reference("float32", world.size, options["accumulate"])[1]
        largest = max(float(np.abs(w).max()) for w in exact)
        weights = trained(world, name, **options)
        assert {w.dtype for w in weights} == {np.dtype("float32")}
        error = moved(weights, exact) / largest
        assert 0 < error < 16 * unit, (name, options, error)


@worlds("mpirun-2", extended=True)
def check_the_comparison_notices(world: World) -> None:
    """With the statistics of each rank and microbatch alone, the result is another one."""
    _, expected = reference("float64", world.size, 1)
    _, other = reference("float64", world.size, 2)
    assert relative_error(other, expected) > 1e-3
