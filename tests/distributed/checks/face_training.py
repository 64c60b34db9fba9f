"""Horovod's optimizer, tape, callbacks, load_model and elastic state through the face, against one process."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from world import World, flat_bytes, plain_training, relative_error

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras

STEPS, BATCH = 20, 8
TOLERANCE = 1e-9  # float64


def model_of(seed: int = 7, dtype: str = "float64") -> Any:
    """Two inputs' worth of gradients: an embedding's rows, and dense ones."""
    keras.utils.set_random_seed(seed)
    layers: list[Any] = [
        keras.Input((3,), dtype="int32"),
        keras.layers.Embedding(5, 4, dtype=dtype, name="table"),
        keras.layers.Flatten(dtype=dtype),
        keras.layers.Dense(6, activation="tanh", dtype=dtype, name="hidden"),
        keras.layers.Dense(1, dtype=dtype, name="out"),
    ]
    return keras.Sequential(layers)


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 5, (STEPS * BATCH, 3)).astype("int32"), rng.standard_normal((STEPS * BATCH, 1))


def batches(size: int = BATCH) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = data()
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


def part(world: World, batch: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """This rank's share of a batch."""
    return batch[0][world.rank :: world.size], batch[1][world.rank :: world.size]


def dataset(world: World) -> tf.data.Dataset:
    parts = [part(world, batch) for batch in batches()]
    x, y = (np.concatenate([each[i] for each in parts]) for i in (0, 1))
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH // world.size)


def per_sample(targets: Any, outputs: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(outputs - targets), axis=-1)


def mean_square(targets: Any, outputs: Any) -> tf.Tensor:
    return tf.reduce_mean(per_sample(targets, outputs))


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def alone(optimizer: Any, size: int = BATCH) -> list[np.ndarray]:
    """One process, the whole batches."""
    return plain_training(model_of(), optimizer, per_sample, batches(size))


def in_own_loop(world: World, optimizer: Any, compiled: bool, way: str = "apply_gradients") -> list[np.ndarray]:
    model = model_of()
    variables = model.trainable_variables

    def step(x: Any, y: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x, training=True))
        if way == "compute_gradients":
            optimizer.apply_gradients(optimizer.compute_gradients(loss, variables, tape))
            return loss
        gradients = tape.gradient(loss, [v.value for v in variables])
        if way == "apply":
            optimizer.apply(gradients, variables)
        else:
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    call = tf.function(step, reduce_retracing=True) if compiled else step
    for batch in batches():
        x, y = part(world, batch)
        call(tf.constant(x), tf.constant(y))
    return [np.array(weight) for weight in model.get_weights()]


def in_fit(world: World, optimizer: Any, **options: Any) -> list[np.ndarray]:
    model = model_of(seed=7 + world.rank)  # the callback makes them alike
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)]
    # Keras computes losses in this type, whatever the layers compute in.
    keras.config.set_floatx("float64")
    try:
        model.compile(optimizer, mean_square)
        model.fit(dataset(world), verbose=0, shuffle=False, callbacks=callbacks, **options)
    finally:
        keras.config.set_floatx("float32")
    return [np.array(weight) for weight in model.get_weights()]


def agree(world: World, weights: list[np.ndarray], reference: list[np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert max(float(np.abs(w - s).max()) for w, s in zip(weights, model_of().get_weights(), strict=True)) > 1e-2
    error = relative_error(weights, reference)
    assert error <= tolerance, error
    assert world.same_everywhere(flat_bytes(weights))


def check_fit_is_training_in_one_process(world: World) -> None:
    agree(world, in_fit(world, hvd.DistributedOptimizer(momentum())), alone(momentum()))


def check_own_loops_are_training_in_one_process(world: World) -> None:
    expected = alone(adam())
    for compiled in (False, True):
        agree(world, in_own_loop(world, hvd_keras.DistributedOptimizer(adam()), compiled), expected)
    agree(world, in_own_loop(world, hvd_keras.DistributedOptimizer(adam()), True, "apply"), expected)
    agree(world, in_own_loop(world, hvd_keras.DistributedOptimizer(adam()), True, "compute_gradients"), expected)


def check_ways_that_gradients_travel(world: World) -> None:
    """Groups, dense rows and factors change nothing; a sum is an average times the ranks; 16 bits are close."""
    expected = alone(momentum())
    ways: list[tuple[dict[str, Any], float]] = [
        ({"groups": 2}, TOLERANCE),
        ({"sparse_as_dense": True}, TOLERANCE),
        ({"gradient_predivide_factor": 2.0}, TOLERANCE),
        # Of 2^-11 at each of two roundings of 20 gradients; velocities add up at most 10 times as much.
        ({"compression": hvd.Compression.fp16, "sparse_as_dense": True}, 20 * 10 * 2**-10),
    ]
    for options, tolerance in ways:
        weights = in_own_loop(world, hvd.DistributedOptimizer(momentum(), **options), True)
        agree(world, weights, expected, tolerance)
    summed = keras.optimizers.SGD(0.05 / world.size, momentum=0.9)
    agree(world, in_own_loop(world, hvd.DistributedOptimizer(summed, op=hvd.Sum), True), expected)


def check_groups_of_variables(world: World) -> None:
    model = model_of()
    groups = [model.get_layer("hidden").trainable_variables, model.get_layer("out").trainable_variables]
    tape_gradients = []
    x, y = part(world, batches()[0])
    for options in ({}, {"groups": groups}, {"groups": 1}):
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x))
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=True, **options)
        tape_gradients.append(tape.gradient(loss, model.trainable_variables))
    for gradients in tape_gradients[1:]:
        for gradient, plain in zip(gradients, tape_gradients[0], strict=True):
            np.testing.assert_allclose(gradient, plain, rtol=1e-12)


def check_backward_passes_per_step(world: World) -> None:
    """Two batches and one update are a batch twice as large, or their sum; the calls are all counted."""

    def averaging() -> Any:
        return hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2, average_aggregated_gradients=True)

    averaged, summed = alone(momentum(), 2 * BATCH), alone(keras.optimizers.SGD(0.1, momentum=0.9), 2 * BATCH)
    summing = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)
    for optimizer, expected in ((averaging(), averaged), (summing, summed)):
        agree(world, in_own_loop(world, optimizer, True), expected)
        assert int(optimizer.iterations) == STEPS
    agree(world, in_own_loop(world, averaging(), False), averaged)
    agree(world, in_fit(world, averaging()), averaged)


def one_rank_overflows(world: World, wrap: Any, passes: int) -> None:
    """An overflow on the last rank is skipped by all, and none waits for it."""
    variable = keras.Variable(np.ones(2, "float32"), name="of_halves")
    optimizer = wrap(keras.optimizers.SGD(1.0), passes)

    @tf.function(autograph=False)
    def step(bad: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.value * (world.rank + 1.0))
            scaled = optimizer.scale_loss(loss)
        gradient = tape.gradient(scaled, variable.value)
        optimizer.apply([tf.where(bad, gradient * np.inf, gradient)], [variable])

    optimizer.build([variable])
    for _ in range(passes):
        step(tf.constant(world.rank == world.size - 1))
    np.testing.assert_array_equal(variable.numpy(), 1.0)
    scale = optimizer.dynamic_scale.numpy()
    assert scale == 512.0, scale
    for _ in range(passes):
        step(tf.constant(False))
    average = (world.size + 1) / 2
    np.testing.assert_allclose(variable.numpy(), 1.0 - passes * average)


def check_loss_scaling_inside_and_outside(world: World) -> None:
    def inside(optimizer: Any, passes: int) -> Any:
        scaling = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
        return hvd.DistributedOptimizer(scaling, backward_passes_per_step=passes)

    def outside(optimizer: Any, passes: int) -> Any:
        reducing = hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
        return keras.optimizers.LossScaleOptimizer(reducing, initial_scale=1024.0)

    for wrap in (inside, outside):
        for passes in (1, 2):
            one_rank_overflows(world, wrap, passes)


def check_layers_that_stay_local(world: World) -> None:
    """Their gradients are divided by the ranks, or left alone."""
    model = model_of()
    x, y = part(world, batches()[0])
    local = model.get_layer("out")

    def gradients(wrap: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x))
        tape = wrap(tape)
        return [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, model.trainable_variables)]

    keep_all = {"local_layers": list(model.layers), "scale_local_gradients": False}
    plain = gradients(lambda tape: hvd.PartialDistributedGradientTape(tape, **keep_all))
    shared = gradients(hvd.DistributedGradientTape)
    for scale, share in ((True, world.size), (False, 1)):
        partial = gradients(
            lambda tape, scale=scale: hvd.PartialDistributedGradientTape(
                tape, local_layers=local, scale_local_gradients=scale
            )
        )
        for i, gradient in enumerate(partial):
            expected = plain[i] / share if i >= len(partial) - 2 else shared[i]
            np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    with tf.GradientTape() as tape:
        loss = mean_square(y, model(x))
    tape = hvd.PartialDistributedGradientTape(tape, local_layers=local)
    of_local, of_others = tape.get_local_and_global_gradients(loss, model.trainable_variables)
    assert (len(of_local), len(of_others)) == (2, 3)
    optimizer = hvd_keras.PartialDistributedOptimizer(
        keras.optimizers.SGD(1.0), local_layers=local, scale_local_gradients=False
    )
    kernel = local.kernel
    before = kernel.numpy()
    optimizer.apply([tf.fill(kernel.shape, tf.cast(world.rank, tf.float64))], [kernel])
    np.testing.assert_allclose(kernel.numpy(), before - world.rank)


def check_an_optimizer_of_a_process_set(world: World) -> None:
    """Ranks outside of the set apply their own gradients."""
    if world.size < 2:
        return
    first_two = hvd.add_process_set([0]) if world.size == 2 else hvd.add_process_set([0, 1])
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=first_two)
    optimizer.apply([tf.constant([world.rank + 1.0])], [keras.Variable(variable.numpy(), name="apart")])
    kept = float(optimizer._trainable_variables[0].numpy()[0])
    expected = {2: [1.0, 2.0], 4: [1.5, 1.5, 3.0, 4.0]}[world.size][world.rank]
    world.gather(b"")
    hvd.remove_process_set(first_two)
    assert kept == -expected, kept


def check_tapes_in_every_shape(world: World) -> None:
    """One that is used as `with`, two that share names in one function, generic names, and a structure."""
    a, b = (tf.Variable([1.0, 2.0], name="same") for _ in range(2))
    average = (world.size + 1) / 2

    @tf.function
    def gradients() -> Any:
        with hvd.DistributedGradientTape(tf.GradientTape()) as first, tf.GradientTape() as recorded:
            loss = (world.rank + 1.0) * tf.reduce_sum(a * a)
            other = (world.rank + 1.0) * tf.reduce_sum(b * 3.0)
        second = hvd.DistributedGradientTape(recorded)
        one = first.gradient(loss, {"a": a, "more": [b]})
        two = second.gradient(other, [b], use_generic_names=True)
        assert one["more"] == [None]
        return one["a"], two[0]

    one, two = gradients()
    np.testing.assert_allclose(one, 2 * average * a.numpy())
    np.testing.assert_allclose(two, [3 * average] * 2)
    for op, expected in ((hvd.Min, 1.0), (hvd.Max, world.size)):
        with tf.GradientTape() as tape:
            loss = (world.rank + 1.0) * tf.reduce_sum(a)
        tape = hvd.DistributedGradientTape(tape, op=op)
        assert isinstance(tape, tf.GradientTape)
        np.testing.assert_allclose(tape.gradient(loss, [a])[0], [expected] * 2)


def check_xla_is_refused_in_words(world: World) -> None:
    variable = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([kept := keras.Variable([1.0], name="xla")])
    try:
        tf.function(lambda: optimizer.apply([variable * 1.0], [kept]), jit_compile=True, autograph=False)()
    except ValueError as error:
        assert "jit_compile=False" in str(error), error
        return
    raise AssertionError("XLA compiled an exchange")


def check_the_callbacks(world: World) -> None:
    """Figures are averages, rates go up to what they should and down again, and momentum follows."""
    seen: list[dict[str, float]] = []
    warmup = hvd_keras.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, momentum_correction=False)
    after = hvd_keras.callbacks.LearningRateScheduleCallback(0.4, lambda epoch: 0.1**epoch, start_epoch=2, end_epoch=3)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1e-9, momentum=0.9))
    model.compile(optimizer, "mae")
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    average = hvd_keras.callbacks.MetricAverageCallback()
    x, y = np.zeros((8, 1), "float32"), np.full((8, 1), world.rank + 1.0, "float32")
    small = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    model.fit(small, epochs=3, verbose=0, callbacks=[average, warmup, after, keep])
    rates = [logs["lr"] for logs in seen]
    # After the first of two epochs the rate is half way between 0.4 / size and 0.4.
    np.testing.assert_allclose(rates, [0.2 * (1 + 1 / world.size), 0.4, 0.4 * 0.01], rtol=1e-6)
    assert world.same_everywhere(repr([logs["loss"] for logs in seen]).encode())


def check_momentum_is_corrected(world: World) -> None:
    """Velocities follow the rate: v <- momentum (new / old) v - new g."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.5)), lambda y, out: tf.reduce_sum(out))
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.1)
    ones = np.ones((1, 1), "float32")
    model.fit(ones, ones, epochs=3, verbose=0, callbacks=[schedule])
    weight = velocity = 0.0
    for old, new in ((0.1, 0.1), (0.1, 0.01), (0.01, 0.001)):
        velocity = 0.5 * new / old * velocity - new
        weight += velocity
    np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-5)


def check_broadcast_leaves_local_variables(world: World) -> None:
    model = model_of(seed=world.rank)
    own = model.get_layer("out").kernel
    before = own.numpy()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), mean_square)
    callback = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(world.size - 1, local_variables=[own])
    x, y = part(world, batches()[0])
    model.fit(x, y, verbose=0, callbacks=[callback])
    np.testing.assert_array_equal(own.numpy(), before)
    expected = model_of(seed=world.size - 1)
    np.testing.assert_array_equal(model.get_layer("table").embeddings.numpy(), expected.get_weights()[0])


class Renamed(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


def check_a_saved_model_goes_on(world: World) -> None:
    """Loaded with its optimizer's state, wrapped; and without Horovod it is an ordinary model."""
    for kind in (adam, lambda: Renamed(0.05, momentum=0.9)):
        model = model_of()
        model.compile(hvd.DistributedOptimizer(kind()), keras.losses.MeanSquaredError())
        model.fit(dataset(world), verbose=0, shuffle=False)
        name = type(model.optimizer).__name__
        path = world.folder / f"face-{name}.keras"
        if world.rank == 0:
            model.save(path)
        world.gather(b"")
        loaded = hvd_keras.load_model(str(path), custom_optimizers=[Renamed], custom_objects={"unused": len})
        assert type(loaded.optimizer).__name__ == name
        assert int(loaded.optimizer.iterations) == STEPS
        plain = keras.models.load_model(path, custom_objects={"Renamed": Renamed})
        assert type(plain.optimizer) is type(kind())
        for each in (model, loaded):
            each.fit(dataset(world), verbose=0, shuffle=False)
        agree(world, [np.array(w) for w in loaded.get_weights()], [np.array(w) for w in model.get_weights()])


def check_best_model_checkpoint(world: World) -> None:
    model = model_of()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
    best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
    best.filepath = str(world.folder / f"best-{world.rank}.weights.h5")
    x, y = data()
    model.fit(x, y, verbose=0, callbacks=[best])
    model.load_weights(best.filepath)


def check_synchronized_batch_normalization(world: World) -> None:
    """Outputs and moving averages are those of plain layers with the whole batch."""
    whole = np.random.default_rng(2).standard_normal((4 * world.size, 3)) * 3 + 1
    mine = whole[4 * world.rank : 4 * (world.rank + 1)]
    layer = hvd.SyncBatchNormalization(momentum=0.5, dtype="float64")
    plain = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
    expected = plain(whole, training=True)[4 * world.rank : 4 * (world.rank + 1)]
    np.testing.assert_allclose(layer(mine, training=True), expected, rtol=1e-9)
    for value, reference in zip(layer.variables, plain.variables, strict=True):
        np.testing.assert_allclose(value.numpy(), reference.numpy(), rtol=1e-9)
    again = hvd.SyncBatchNormalization.from_config(layer.get_config())
    assert again.momentum == 0.5


def check_elastic_states(world: World) -> None:
    """What rank 0 has is synchronized; what was committed comes back."""
    variable = tf.Variable([float(world.rank)])
    state = hvd.elastic.TensorFlowState([variable], batch=world.rank)
    state.sync()
    assert (float(variable[0]), state.batch) == (0.0, 0)
    variable.assign([5.0])
    state.batch = 5
    state.save()
    variable.assign([6.0])
    state.batch = 6
    state.restore()
    assert (float(variable[0]), state.batch) == (5.0, 5)

    model = model_of(seed=world.rank)
    model.compile(hvd.DistributedOptimizer(momentum()), mean_square)
    keras_state = hvd_keras.elastic.KerasState(model, batch=0, epoch=world.rank)
    assert len(model.optimizer.variables) > 2, "slots are not part of the state"
    keras_state.sync()
    assert keras_state.epoch == 0
    assert world.same_everywhere(flat_bytes(model.get_weights()))
    callbacks = [
        hvd_keras.elastic.CommitStateCallback(keras_state, batches_per_commit=2),
        hvd_keras.elastic.UpdateBatchStateCallback(keras_state),
        hvd_keras.elastic.UpdateEpochStateCallback(keras_state),
    ]
    model.fit(dataset(world).take(3), epochs=2, verbose=0, callbacks=callbacks)
    assert (keras_state.batch, keras_state.epoch) == (0, 2)
    kept = [np.array(weight) for weight in model.get_weights()]
    velocity = model.optimizer.variables[-1].numpy()
    keras_state.save()
    model.fit(dataset(world), verbose=0)
    keras_state.restore()
    assert flat_bytes(kept) == flat_bytes(model.get_weights())
    np.testing.assert_array_equal(model.optimizer.variables[-1].numpy(), velocity)
