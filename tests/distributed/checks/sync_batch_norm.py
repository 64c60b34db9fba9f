"""Batch normalization over all ranks is that of one process with the whole batch."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from world import World, flat_bytes, moved, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.data.batch import slice_bounds
from hvdtrain.layers.convert import with_sync_batch_norm
from hvdtrain.layers.sync_batch_norm import SyncBatchNormalization, replicas_of, sync_layers

TOLERANCE = {"float32": 1e-6, "float64": 1e-9}
SAMPLES, BATCH, EPOCHS = 35, 16, 7  # two full batches and one of 3 samples, where ranks of 4 have none: 21 steps
WITHOUT_GRADIENT = "conv/bias"
"""The normalization takes the mean off again: what is left of its gradient is rounding."""


def conv_model(dtype: str) -> keras.Model:
    """Return a model with plain BatchNormalization, of the same values on every rank."""
    keras.utils.set_random_seed(11)
    inputs = keras.Input((6, 6, 3), dtype=dtype)
    x = layers.Conv2D(5, 3, name="conv", dtype=dtype)(inputs)
    x = layers.BatchNormalization(name="norm", momentum=0.9, dtype=dtype)(x)
    x = layers.Activation("tanh", dtype=dtype)(x)
    x = layers.BatchNormalization(name="last", momentum=0.9, dtype=dtype)(layers.Flatten(dtype=dtype)(x))
    return keras.Model(inputs, layers.Dense(3, name="top", dtype=dtype)(x))


def images(dtype: str, samples: int = SAMPLES) -> np.ndarray:
    """Return images whose mean drifts from sample to sample, so that no rank has the statistics of another."""
    drift = np.linspace(-1.0, 2.0, samples).reshape(-1, 1, 1, 1)
    return (np.random.default_rng(12).standard_normal((samples, 6, 6, 3)) + drift).astype(dtype)


def dtypes(world: World) -> list[str]:
    """Return the precisions to check; four ranks add up what two have, and the stricter one shows that."""
    return ["float64"] if world.size > 2 else list(TOLERANCE)


def passes(model: keras.Model, x: tf.Tensor, slope: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return output and gradients, of inputs and by path of parameters, of the loss sum(slope * output)."""
    sources = {v.path: v.value for v in model.trainable_variables if v.path != WITHOUT_GRADIENT}
    with tf.GradientTape() as tape:
        tape.watch(x)
        output = model(x, training=True)
        loss = tf.reduce_sum(output * slope)
    gradients = tape.gradient(loss, {"inputs": x, **sources})
    return {"output": output, **gradients}


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_passes_equal_one_process(world: World) -> None:
    """Forward and backward, eagerly and compiled, with parts of unequal size and with a rank that has none."""
    for dtype in dtypes(world):
        for compiled in (False, True):
            for holders in {world.size, max(1, world.size - 1)}:
                error = passes_error(world, dtype, compiled, holders)
                assert error < TOLERANCE[dtype], (dtype, compiled, holders, error)


@worlds("mpirun-2", extended=True)
def check_passes_of_each_rank_alone_are_not_equal(world: World) -> None:
    if world.size > 1:
        error = passes_error(world, "float64", True, world.size, convert=lambda model: model)
        assert error > 1e-2, error


def passes_error(
    world: World, dtype: str, compiled: bool, holders: int, *, convert: Any = with_sync_batch_norm
) -> float:
    """Return the largest error of outputs, gradients of inputs and those of parameters, as a share of their largest.

    The first `holders` ranks share the batch; the others hold a sample that does not count.
    """
    x = images(dtype, 11)
    slope = np.random.default_rng(13).standard_normal((11, 3)).astype(dtype)
    begin, end, has_samples = slice_bounds(11, world.rank, holders) if world.rank < holders else (0, 1, 0.0)
    model = convert(conv_model(dtype))
    run = tf.function(passes, autograph=False) if compiled else passes
    with replicas_of(sync_layers(model), world.backend, tf.constant(has_samples)):
        part = run(model, tf.constant(x[begin:end]), tf.constant(slope[begin:end] * has_samples))
    reference = passes(conv_model(dtype), tf.constant(x), tf.constant(slope))
    errors = [0.0]
    for name in ("output", "inputs") if has_samples else ():
        errors.append(relative_error([part[name].numpy()], [reference[name].numpy()[begin:end]]))
    paths = sorted(part.keys() - {"output", "inputs"})
    total = [world.backend.all_reduce(part[path], name=f"check/{path}").numpy() for path in paths]
    return max(*errors, relative_error(total, [reference[path].numpy() for path in paths]))


def train(model: keras.Model, dtype: str, world: World | None) -> list[np.ndarray]:
    """Train on this rank's part of each batch, or on all of it; return all weights but the one without gradient."""
    x, targets = images(dtype), np.random.default_rng(14).integers(0, 3, SAMPLES)
    optimizer = keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(model.trainable_variables)
    exchange = world.backend if world else None
    rank, size = (world.rank, world.size) if world else (0, 1)

    @tf.function(autograph=False, reduce_retracing=True)
    def step(x: tf.Tensor, targets: tf.Tensor, has_samples: tf.Tensor, samples: tf.Tensor) -> None:
        tape = hvdtrain.DistributedGradientTape(op="sum", exchange=exchange) if world else tf.GradientTape()
        with replicas_of(sync_layers(model), exchange, has_samples), tape:
            losses = keras.losses.sparse_categorical_crossentropy(targets, model(x, training=True), from_logits=True)
            loss = tf.reduce_sum(losses) * tf.cast(has_samples / samples, losses.dtype)
        sources = [v.value for v in model.trainable_variables]
        optimizer.apply(tape.gradient(loss, sources), model.trainable_variables)

    for first in [*range(0, SAMPLES, BATCH)] * EPOCHS:
        batch, labels = x[first : first + BATCH], targets[first : first + BATCH]
        begin, end, has_samples = slice_bounds(len(batch), rank, size)
        count = tf.constant(float(len(batch)))
        step(tf.constant(batch[begin:end]), tf.constant(labels[begin:end]), tf.constant(has_samples), count)
    return [v.numpy() for v in model.weights if v.path != WITHOUT_GRADIENT]


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_training_equals_one_process(world: World) -> None:
    """Weights and moving statistics after 21 steps of a loop of one's own."""
    for dtype in dtypes(world):
        plain = conv_model(dtype)
        start = [v.numpy() for v in plain.weights if v.path != WITHOUT_GRADIENT]
        reference = train(plain, dtype, None)
        weights = train(with_sync_batch_norm(conv_model(dtype)), dtype, world)
        assert moved(reference, start) > 1e-2
        error = relative_error(weights, reference)
        assert error < TOLERANCE[dtype], (dtype, error)
        assert world.same_everywhere(flat_bytes(weights))


@worlds("mpirun-2", extended=True)
def check_microbatches_in_a_loop(world: World) -> None:
    """Each iteration has the statistics of all ranks' microbatches; gradients add up over iterations and ranks."""
    count, length = 4, 3
    x = images("float64", count * length * world.size).reshape(count, world.size, length, 6, 6, 3)
    model, plain = with_sync_batch_norm(conv_model("float64")), conv_model("float64")
    slope = tf.constant(np.random.default_rng(15).standard_normal((world.size, length, 3)))
    mine, total = tf.constant(x[:, world.rank]), tf.Variable(tf.zeros_like(model.layers[1].kernel.value))

    def add(number: Any) -> Any:
        with replicas_of(sync_layers(model), world.backend, tf.cast(number < count, tf.float32)):
            total.assign_add(passes(model, mine[number], slope[world.rank])["conv/kernel"])
        return number + 1

    @tf.function(autograph=False)
    def accumulate() -> Any:
        # As in the training step: the first one before the loop.
        begin = tf.constant(add(0))
        return tf.while_loop(lambda number: number < count, add, [begin], parallel_iterations=1)[0]

    accumulate()
    flat = tf.reshape(slope, [-1, 3])
    reference = [passes(plain, tf.constant(part.reshape(-1, 6, 6, 3)), flat)["conv/kernel"].numpy() for part in x]
    ours = world.backend.all_reduce(total.read_value(), name="check/total").numpy()
    assert relative_error([ours], [sum(reference)]) < TOLERANCE["float64"]
    statistics = [np.array(v) for v in model.non_trainable_variables]
    assert relative_error(statistics, [np.array(v) for v in plain.non_trainable_variables]) < TOLERANCE["float64"]
    assert world.same_everywhere(flat_bytes(statistics))


@worlds("mpirun-2", extended=True)
def check_layer_in_two_branches(world: World) -> None:
    """Two calls of one layer, and another layer of the same path, are under way at once over the session's ranks."""
    layer, other = SyncBatchNormalization(name="twin"), SyncBatchNormalization(name="twin")
    rows = np.random.default_rng(16).standard_normal((3, 4 * world.size, 5))
    mine = [tf.constant(part[world.rank :: world.size], tf.float32) for part in rows]

    @tf.function(autograph=False)
    def branches(a: tf.Tensor, b: tf.Tensor, c: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch([a, b, c])
            outputs = layer(a, training=True), layer(b, training=True), other(c, training=True)
            loss = tf.add_n([tf.reduce_sum(output**3) for output in outputs])
        return outputs, tape.gradient(loss, [a, b, c])

    for _ in range(5):
        outputs, gradients = branches(*mine)
        for part, output, gradient in zip(rows, outputs, gradients, strict=True):
            whole = tf.constant(part, tf.float32)
            with tf.GradientTape() as tape:
                tape.watch(whole)
                expected = layers.BatchNormalization()(whole, training=True)
                loss = tf.reduce_sum(expected**3)
            for ours, reference in ((output, expected), (gradient, tape.gradient(loss, whole))):
                np.testing.assert_allclose(ours, reference[world.rank :: world.size], atol=2e-5)


@worlds("mpirun-2", extended=True, why="names that Keras numbers over all models of a process")
def check_ranks_that_built_other_models_before_normalize_together(world: World) -> None:
    for _ in range(world.rank):
        keras.Sequential([keras.Input((3,)), hvdtrain.SyncBatchNormalization()])
    model = keras.Sequential([keras.Input((3,)), hvdtrain.SyncBatchNormalization(), keras.layers.Dense(1)])
    data = np.random.default_rng(0).standard_normal((12, 3)).astype("float32")
    trainer = hvdtrain.Trainer(model, "sgd", "mse", backend=world.backend)
    assert trainer.fit(data, data[:, :1], batch=6, epochs=1, verbose=0).steps == 2
