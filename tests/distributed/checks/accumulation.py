"""K microbatches and one exchange are one large batch, in the trainer and in a user's own loop."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, MODELS, SAMPLES, TOLERANCE, dense_data, dense_model, per_sample
from checks.parity import Sabotaged, assert_parity, parity_error
from world import World, exact_arrays, flat_bytes, moved, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.optim.precision import precision


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-2", "gloo-4", extended=True)
@exact_arrays()
def check_trainer_dense_and_sparse(world: World) -> None:
    """A batch of 16 in two or four microbatches on each rank, with a tail of 6 that does not divide."""
    assert_parity(world, "dense", "adam", "float64", accumulate=4)
    assert_parity(world, "embedding", "sgd", "float32", accumulate=2)


@worlds("mpirun-2", extended=True)
def check_the_comparison_notices(world: World) -> None:
    backend = Sabotaged(world.backend, 2.0)
    error = parity_error(world, "dense", "sgd", "float32", backend=backend, accumulate=2)
    assert error > 1e3 * TOLERANCE["float32"], f"{error:.2e}"
    error = parity_error(world, "dense", "sgd", "float32", drop=1, accumulate=2)
    assert error > 1e3 * TOLERANCE["float32"], f"{error:.2e}"


@worlds("mpirun-2", extended=True)
def check_sparse_gradients_either_way(world: World) -> None:
    for way, accumulate in (("gather", 2), ("dense", 2), ("gather", 1)):
        assert_parity(world, "embedding", "adam", "float64", sparse_gradients=way, accumulate=accumulate)


def large_table(world: World, rows: int, touched: int) -> float:
    """Train an embedding that is too large to travel dense unasked; return the relative error."""
    rng = np.random.default_rng(7)
    x = rng.integers(0, touched, (SAMPLES, 5)).astype("int32")
    y = rng.integers(0, 3, SAMPLES)

    def build(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        layers = [keras.layers.Embedding(rows, 16, dtype="float64"), keras.layers.Flatten(dtype="float64")]
        return keras.Sequential([keras.Input((5,), dtype="int32"), *layers, keras.layers.Dense(3, dtype="float64")])

    trainer = hvdtrain.Trainer(build(world.rank), keras.optimizers.Adam(0.01), CROSS_ENTROPY, backend=world.backend)
    trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False, log_every=1)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, SAMPLES, 16)] * 2
    return relative_error(
        trainer.model.get_weights(), plain_training(build(0), keras.optimizers.Adam(0.01), per_sample, batches)
    )


@worlds("mpirun-2", extended=True)
def check_a_large_table_with_few_rows_touched(world: World) -> None:
    assert large_table(world, rows=5000, touched=40) <= 1e-9


@worlds("mpirun-2", extended=True)
def check_a_large_table_with_most_rows_touched(world: World) -> None:
    assert large_table(world, rows=600, touched=600) <= 1e-9


@worlds("mpirun-2", "gloo-4")
@worlds("gloo-1", "gloo-2", "mirrored", "multi_worker_mirrored", extended=True)
def check_tables_of_which_some_travel_as_rows(world: World) -> None:
    """Of one row shape are two whose rows are gathered and one that is reduced; of another shape is one more."""
    tables = {"many": (5000, 16, 40), "few": (4000, 16, 7), "all": (600, 16, 600), "wide": (3000, 24, 90)}
    rng = np.random.default_rng(7)
    x = {name: rng.integers(0, touched, (SAMPLES, 5)).astype("int32") for name, (_, _, touched) in tables.items()}
    y = rng.integers(0, 3, SAMPLES)

    def build(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        inputs = {name: keras.Input((5,), dtype="int32", name=name) for name in tables}
        found = [
            keras.layers.Embedding(rows, width, dtype="float64", name=f"{name}_table")(inputs[name])
            for name, (rows, width, _) in tables.items()
        ]
        joined = keras.layers.Concatenate(dtype="float64")(found)
        return keras.Model(inputs, keras.layers.Dense(3, dtype="float64")(keras.ops.mean(joined, 1)))

    trainer = hvdtrain.Trainer(
        lambda: build(world.rank), lambda: keras.optimizers.Adam(0.01), CROSS_ENTROPY, backend=world.backend
    )
    trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    batches = [({n: rows[i : i + 16] for n, rows in x.items()}, y[i : i + 16]) for i in range(0, SAMPLES, 16)] * 2
    expected = plain_training(build(0), keras.optimizers.Adam(0.01), per_sample, batches)
    error = relative_error(trainer.model.get_weights(), expected)
    assert error <= 1e-9, f"{error:.2e}"


def own_loop(world: World, *, compiled: bool, sparse: bool) -> None:
    """Each rank adds three microbatches of different sizes, then a group that is not complete."""
    build, data = MODELS["embedding" if sparse else "dense"]
    x, y = data("float64")
    model, optimizer = build("float64", seed=0), keras.optimizers.Adam(0.01)
    start = [np.array(w) for w in model.get_weights()]
    variables = model.trainable_variables
    accumulator = hvdtrain.GradientAccumulator(variables, steps=3)

    def microbatch(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(per_sample(targets, model(inputs, training=True)))
        gradients = tape.gradient(loss, [v.value for v in variables])
        return accumulator.step(gradients, optimizer, weight=tf.shape(inputs)[0])

    run = tf.function(microbatch, autograph=False, reduce_retracing=True) if compiled else microbatch
    flush = (
        tf.function(lambda: accumulator.flush(optimizer), autograph=False)
        if compiled
        else lambda: accumulator.flush(optimizer)
    )
    sizes = [1, 2, 3]
    batches, at, applied = [], 0, []
    for group in range(6):
        parts = sizes if group < 5 else sizes[:2]
        begin = at
        for size in parts:
            for rank in range(world.size):
                if rank == world.rank:
                    rows = [i % SAMPLES for i in range(at, at + size)]
                    applied.append(bool(run(tf.constant(x[rows]), tf.constant(y[rows]))))
                at += size
        rows = [i % SAMPLES for i in range(begin, at)]
        batches.append((x[rows], y[rows]))
    assert applied == [False, False, True] * 5 + [False, False], applied
    assert bool(flush())
    assert not bool(flush()), "there was nothing left"
    assert world.same_everywhere(flat_bytes(model.get_weights()))
    reference = build("float64", seed=0)
    expected = plain_training(reference, keras.optimizers.Adam(0.01), per_sample, batches)
    assert moved(expected, start) >= 1e-2
    error = relative_error(model.get_weights(), expected)
    assert error <= TOLERANCE["float64"], f"{error:.2e}"


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_own_loop_compiled(world: World) -> None:
    own_loop(world, compiled=True, sparse=False)


@worlds("mpirun-2", extended=True)
def check_own_loop_eager(world: World) -> None:
    own_loop(world, compiled=False, sparse=False)


@worlds("mpirun-2", "gloo-2", "gloo-1", "gloo-4", extended=True)
def check_own_loop_sparse(world: World) -> None:
    own_loop(world, compiled=True, sparse=True)


def in_fp16() -> keras.Model:
    keras.utils.set_random_seed(0)
    with precision("mixed_float16"):
        layers = [keras.layers.Dense(12, activation="relu"), keras.layers.Dense(3, dtype="float32")]
    return keras.Sequential([keras.Input((6,)), *layers])


def scaled_gradients(model: keras.Model, scale: tf.Tensor, x: np.ndarray, y: np.ndarray) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = scale * tf.reduce_mean(per_sample(tf.constant(y), model(tf.constant(x), training=True)))
    return tape.gradient(loss, [v.value for v in model.trainable_variables])


def check_own_loop_in_fp16_skips_groups_that_overflow(world: World) -> None:
    """Three groups of two microbatches; in the second one the first microbatch of the last rank overflows.

    One process that leaves out that group and adds up the same microbatches has the same weights: products in fp16
    are rounded alike, and sums are formed in 32 bits.
    """
    x, y = dense_data("float32")

    def rows(group: int, part: int, rank: int) -> slice:
        begin = ((group * 2 + part) * world.size + rank) * 2
        return slice(begin, begin + 2)

    x[rows(1, 0, world.size - 1)] = 3e4
    model, reference = in_fp16(), in_fp16()
    start = model.get_weights()
    inner = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer = hvdtrain.LossScaleOptimizer(inner, initial_scale=1024.0)
    optimizer.build(model.trainable_variables)
    accumulator = hvdtrain.GradientAccumulator(model.trainable_variables, steps=2)
    for group in range(3):
        for part in range(2):
            mine = rows(group, part, world.rank)
            gradients = scaled_gradients(model, tf.convert_to_tensor(optimizer.dynamic_scale), x[mine], y[mine])
            assert bool(accumulator.step(gradients, optimizer)) == (part == 1)
        assert float(optimizer.dynamic_scale) == (1024.0 if group == 0 else 512.0)
        assert int(inner.iterations) == (1, 1, 2)[group]
        assert world.same_everywhere(flat_bytes([v.numpy() for v in (*model.weights, *optimizer.variables)]))
    rule = keras.optimizers.SGD(0.1, momentum=0.9)
    for group, scale in ((0, 1024.0), (2, 512.0)):
        parts = [rows(group, part, rank) for part in range(2) for rank in range(world.size)]
        each = [scaled_gradients(reference, tf.constant(scale), x[part], y[part]) for part in parts]
        mean = [tf.add_n(list(same)) / (scale * len(each)) for same in zip(*each, strict=True)]
        rule.apply(mean, reference.trainable_variables)
    assert moved(reference.get_weights(), start) > 1e-2
    error = relative_error(model.get_weights(), reference.get_weights())
    assert error <= TOLERANCE["float32"], f"{error:.2e}"


class Counting:
    """A backend that counts what is exchanged each time the step runs, not each time it is traced."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.count = tf.Variable(0, trainable=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def all_reduce(self, tensor: tf.Tensor, *, name: str, **options: Any) -> tf.Tensor:
        if name.startswith("gradient/"):
            self.count.assign_add(1)
        return self._backend.all_reduce(tensor, name=name, **options)


def check_k_microbatches_are_exchanged_once(world: World) -> None:
    x, y = dense_data("float32")
    for accumulate in (1, 2, 4):
        backend = Counting(world.backend)
        model = dense_model("float32", 0)
        trainer = hvdtrain.Trainer(model, "sgd", CROSS_ENTROPY, backend=backend, accumulate=accumulate)
        trainer.fit((x, y), batch=16, epochs=1, shuffle=False, verbose=False)
        # Of small gradients all share one, in which the sums of loss and weight travel along.
        assert int(backend.count) == 5, f"{int(backend.count)} exchanges in 5 steps"


@worlds("mpirun-2", extended=True)
def check_batch_norm_sees_microbatches(world: World) -> None:
    """Statistics are those of one microbatch after another: moving averages move K times in a step."""
    x, y = dense_data("float32")
    norm = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((6,)), norm, keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.0), CROSS_ENTROPY, backend=world.backend, accumulate=2)
    trainer.fit((x[:16], y[:16]), batch=16, epochs=1, shuffle=False, verbose=False)
    trainer.state.average_statistics(world.backend)
    each = 16 // world.size // 2
    moving = []
    for rank in range(world.size):
        mean = np.zeros(6)
        for part in (0, 1):
            first = rank * 2 * each + part * each
            mean = 0.5 * mean + 0.5 * x[first : first + each].mean(axis=0)
        moving.append(mean)
    np.testing.assert_allclose(norm.moving_mean.numpy(), np.mean(moving, axis=0), rtol=1e-5, atol=1e-6)
