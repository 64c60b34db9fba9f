"""The face under TF_USE_LEGACY_KERAS=1: tf_keras' optimizers, callbacks, layer, loading and state, against one process.

The battery runs these in a launch of their own, with that variable set.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from checks import broadcast_cases, wrapped_cases
from checks.face_cases import BATCH, STEPS, TOLERANCE, batches, dataset, leaves_local_variables, model_of, part
from world import World, flat_bytes, relative_error
from worlds import worlds

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras

keras = tf.keras
legacy = keras.optimizers.legacy


def momentum() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


def momentum_of_sums() -> Any:
    """Return what `momentum` with the sum of two gradients is with their average."""
    return keras.optimizers.SGD(0.1, momentum=0.9)


def legacy_momentum() -> Any:
    return legacy.SGD(0.05, momentum=0.9)


def legacy_adam() -> Any:
    return legacy.Adam(0.01)


KINDS = [momentum, legacy_momentum]


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def mean_square(targets: Any, outputs: Any) -> tf.Tensor:
    return tf.reduce_mean(tf.square(outputs - tf.cast(targets, outputs.dtype)))


def weights_of(model: Any) -> list[np.ndarray]:
    return [np.array(weight) for weight in model.get_weights()]


def alone(make: Callable[[], Any], size: int = BATCH) -> list[np.ndarray]:
    """One process, whole batches, nothing of Horovod."""
    model, optimizer = model_of(), make()
    for x, y in batches(size):
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(dense, model.trainable_variables, strict=True))
    return weights_of(model)


def in_fit(world: World, optimizer: Any, callbacks: Sequence[Any] = ()) -> list[np.ndarray]:
    model = model_of(seed=7 + world.rank)  # the callback makes them alike
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), *callbacks]
    keras.backend.set_floatx("float64")  # Keras computes losses in this type
    try:
        model.compile(optimizer, mean_square)
        model.fit(dataset(world), verbose=0, shuffle=False, callbacks=callbacks)
    finally:
        keras.backend.set_floatx("float32")
    return weights_of(model)


def in_own_loop(world: World, optimizer: Any, way: str = "apply_gradients") -> list[np.ndarray]:
    model = model_of()
    variables = model.trainable_variables

    @tf.function(reduce_retracing=True)
    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x, training=True))
        if way == "minimize":
            optimizer.minimize(loss, variables, tape=tape)
        elif way == "compute_gradients":
            optimizer.apply_gradients(optimizer.compute_gradients(loss, variables, tape))
        elif way == "tape":
            gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for batch in batches():
        x, y = part(world, batch)
        step(tf.constant(x), tf.constant(y))
    return weights_of(model)


def agree(world: World, weights: list[np.ndarray], reference: list[np.ndarray], tolerance: float = TOLERANCE) -> None:
    assert max(float(np.abs(w - s).max()) for w, s in zip(weights, weights_of(model_of()), strict=True)) > 1e-2
    error = relative_error(weights, reference)
    assert error <= tolerance, error
    assert world.same_everywhere(flat_bytes(weights))


@worlds("tf_keras", extended=True)
def check_tf_keras_is_the_keras_of_this_process(world: World) -> None:
    assert keras.Model.__module__.startswith("tf_keras.")
    assert issubclass(hvd.SyncBatchNormalization, keras.layers.BatchNormalization)


@worlds("tf_keras", extended=True)
def check_fit_is_training_in_one_process(world: World) -> None:
    for kind in (*KINDS, adam, legacy_adam):
        agree(world, in_fit(world, hvd_keras.DistributedOptimizer(kind())), world.reference(alone, kind))


@worlds("tf_keras", extended=True)
def check_a_rank_that_trains_alone_differs(world: World) -> None:
    """The comparison notices an optimizer that does not reduce."""
    weights = in_fit(world, KINDS[0]())
    assert relative_error(weights, world.reference(alone, momentum)) > 1e-3
    assert not world.same_everywhere(flat_bytes(weights))


@worlds("tf_keras", extended=True)
def check_own_loops_are_training_in_one_process(world: World) -> None:
    for kind in KINDS:
        expected = world.reference(alone, kind)
        for way in ("apply_gradients", "compute_gradients", "minimize"):
            agree(world, in_own_loop(world, hvd.DistributedOptimizer(kind()), way), expected)
        agree(world, in_own_loop(world, kind(), "tape"), expected)


@worlds("tf_keras", extended=True)
def check_ways_that_gradients_travel(world: World) -> None:
    """Groups, dense rows and factors change nothing; a sum is an average times the ranks; 16 bits are close."""
    expected = world.reference(alone, momentum)
    ways: list[tuple[dict[str, Any], float]] = [
        ({"groups": 2, "gradient_predivide_factor": 2.0}, TOLERANCE),
        ({"sparse_as_dense": True}, TOLERANCE),
        # Of 2^-11 at each of two roundings of 10 gradients; velocities add up at most 10 times as much.
        ({"compression": hvd.Compression.fp16, "sparse_as_dense": True}, 10 * 10 * 2**-10),
    ]
    for options, tolerance in ways:
        agree(world, in_own_loop(world, hvd.DistributedOptimizer(KINDS[0](), **options)), expected, tolerance)
    summed = legacy.SGD(0.05 / world.size, momentum=0.9)
    agree(world, in_own_loop(world, hvd.DistributedOptimizer(summed, op=hvd.Sum), "minimize"), expected)


@worlds("tf_keras", extended=True)
def check_backward_passes_per_step(world: World) -> None:
    """Two batches and one update are a batch twice as large, or their sum; the calls are all counted."""
    for kind in KINDS:
        averaging = hvd.DistributedOptimizer(kind(), backward_passes_per_step=2, average_aggregated_gradients=True)
        agree(world, in_fit(world, averaging), world.reference(alone, kind, 2 * BATCH))
        assert int(averaging.iterations) == STEPS
    summed = world.reference(alone, momentum_of_sums, 2 * BATCH)
    for way in ("apply_gradients", "compute_gradients"):
        summing = hvd.DistributedOptimizer(KINDS[0](), backward_passes_per_step=2)
        agree(world, in_own_loop(world, summing, way), summed)


def one_rank_overflows(world: World, optimizer: Any, passes: int) -> None:
    """An overflow on the last rank is skipped by all, and none waits for it."""
    variable = tf.Variable(np.ones(2, "float32"))

    @tf.function(autograph=False)
    def step(bad: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            scaled = optimizer.get_scaled_loss(tf.reduce_sum(variable) * (world.rank + 1.0))
        gradient = optimizer.get_unscaled_gradients([tape.gradient(scaled, variable)])[0]
        optimizer.apply_gradients([(tf.where(bad, gradient * np.inf, gradient), variable)])

    for _ in range(passes):
        step(tf.constant(world.rank == world.size - 1))
    np.testing.assert_array_equal(variable.numpy(), 1.0)
    scale = float(optimizer.loss_scale)
    assert scale == 512.0, scale
    for _ in range(passes):
        step(tf.constant(False))
    average = (world.size + 1) / 2
    np.testing.assert_allclose(variable.numpy(), 1.0 - passes * average)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable) * (world.rank + 1.0)
    before = variable.numpy()
    for _ in range(passes):  # as model.fit does it
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) * (world.rank + 1.0)
        optimizer.minimize(loss, [variable], tape=tape)
    np.testing.assert_allclose(variable.numpy(), before - passes * average)


@worlds("tf_keras", extended=True)
def check_loss_scaling_inside_and_outside(world: World) -> None:
    scaling = keras.mixed_precision.LossScaleOptimizer
    for kind in (keras.optimizers.SGD, legacy.SGD):
        for passes in (1, 2):
            inside = hvd.DistributedOptimizer(scaling(kind(1.0), initial_scale=1024.0), backward_passes_per_step=passes)
            one_rank_overflows(world, inside, passes)
            reducing = hvd.DistributedOptimizer(kind(1.0), backward_passes_per_step=passes)
            one_rank_overflows(world, scaling(reducing, initial_scale=1024.0), passes)


@worlds("tf_keras", extended=True)
def check_fit_with_16_bits(world: World) -> None:
    """Keras puts a LossScaleOptimizer around the optimizer; rank 0's state of it is taken over."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        keras.utils.set_random_seed(world.rank)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1, dtype="float32")])
        model.compile(hvd.DistributedOptimizer(adam()), "mse")
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert isinstance(model.optimizer, keras.mixed_precision.LossScaleOptimizer)
    model.optimizer._loss_scale.current_loss_scale.assign(64.0 * (1 + world.rank))
    rng = np.random.default_rng(world.rank)
    x, y = rng.standard_normal((16, 4)).astype("float32"), rng.standard_normal((16, 1)).astype("float32")
    broadcast = hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[broadcast])
    assert float(model.optimizer.loss_scale) == 64.0
    assert int(model.optimizer.iterations) == 4
    assert world.same_everywhere(flat_bytes(weights_of(model)))


@worlds("tf_keras", extended=True)
def check_layers_that_stay_local(world: World) -> None:
    """Their gradients are divided by the ranks, or left alone."""
    model = model_of()
    x, y = part(world, batches()[0])
    local = model.get_layer("out")

    def gradients(wrap: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = mean_square(y, model(x))
        return [tf.convert_to_tensor(g).numpy() for g in wrap(tape).gradient(loss, model.trainable_variables)]

    plain, shared = gradients(lambda tape: tape), gradients(hvd.DistributedGradientTape)
    partial = gradients(lambda tape: hvd.PartialDistributedGradientTape(tape, local_layers=local))
    for i, gradient in enumerate(partial):
        expected = plain[i] / world.size if i >= len(partial) - 2 else shared[i]
        np.testing.assert_allclose(gradient, expected, rtol=1e-12)
    for kind in (keras.optimizers.SGD, legacy.SGD):
        optimizer = hvd_keras.PartialDistributedOptimizer(kind(1.0), local_layers=local, scale_local_gradients=False)
        before = local.kernel.numpy()
        optimizer.apply_gradients([(tf.fill(local.kernel.shape, tf.cast(world.rank, tf.float64)), local.kernel)])
        np.testing.assert_allclose(local.kernel.numpy(), before - world.rank)


@worlds("tf_keras", extended=True)
def check_an_optimizer_of_a_process_set(world: World) -> None:
    """Ranks outside of the set apply their own gradients; what is given as reduced is applied as it is."""
    first = hvd.add_process_set([0])
    kept = []
    for kind in (keras.optimizers.SGD, legacy.SGD):
        variable = tf.Variable([0.0])
        hvd.DistributedOptimizer(kind(1.0), process_set=first).apply_gradients([(tf.ones(1) * world.rank, variable)])
        kept.append(float(variable[0]))
    variable = tf.Variable([0.0])
    pair = [(tf.ones(1) * world.rank, variable)]
    hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply_gradients(pair, skip_gradients_aggregation=True)
    hvd.DistributedOptimizer(legacy.SGD(1.0)).apply_gradients(pair, experimental_aggregate_gradients=False)
    kept.append(float(variable[0]) / 2)
    world.gather(b"")
    hvd.remove_process_set(first)
    assert kept == [-float(world.rank)] * 3, kept


@worlds("tf_keras", extended=True)
def check_the_callbacks(world: World) -> None:
    """Figures are averages, and rates go up to what they should and down again."""
    for kind in (keras.optimizers.SGD, legacy.SGD):
        seen: list[dict[str, float]] = []
        warmup = hvd_keras.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, momentum_correction=False)
        after = hvd_keras.callbacks.LearningRateScheduleCallback(0.4, lambda e: 0.1**e, start_epoch=2, end_epoch=3)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        model.compile(hvd.DistributedOptimizer(kind(1e-9, momentum=0.9)), "mae")
        keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs, seen=seen: seen.append(dict(logs)))
        average = hvd_keras.callbacks.MetricAverageCallback()
        x, y = np.zeros((8, 1), "float32"), np.full((8, 1), world.rank + 1.0, "float32")
        small = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
        model.fit(small, epochs=3, verbose=0, callbacks=[average, warmup, after, keep])
        # After the first of two epochs the rate is half way between 0.4 / size and 0.4.
        rates = [logs["lr"] for logs in seen]
        np.testing.assert_allclose(rates, [0.2 * (1 + 1 / world.size), 0.4, 0.4 * 0.01], rtol=1e-6)
        assert world.same_everywhere(repr([logs["loss"] for logs in seen]).encode())


@worlds("tf_keras", extended=True)
def check_momentum_is_corrected(world: World) -> None:
    """Velocities follow the rate: v <- momentum (new / old) v - new g."""
    weight = velocity = 0.0
    for old, new in ((0.1, 0.1), (0.1, 0.01), (0.01, 0.001)):
        velocity = 0.5 * new / old * velocity - new
        weight += velocity
    for kind in (keras.optimizers.SGD, legacy.SGD):
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(hvd.DistributedOptimizer(kind(0.1, momentum=0.5)), lambda y, out: tf.reduce_sum(out))
        schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.1)
        model.fit(np.ones((1, 1)), np.ones((1, 1)), epochs=3, verbose=0, callbacks=[schedule])
        np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-5)


@worlds("tf_keras", extended=True)
def check_broadcast_leaves_local_variables(world: World) -> None:
    leaves_local_variables(world, hvd.DistributedOptimizer(legacy.SGD(0.0)), mean_square)


def scaled(optimizer: Any) -> Any:
    return keras.mixed_precision.LossScaleOptimizer(optimizer)


@worlds("tf_keras", extended=True)
def check_models_that_are_built_in_the_first_step(world: World) -> None:
    sequential, subclassed = broadcast_cases.sequential, broadcast_cases.Subclassed
    kinds = [(sequential, adam), (subclassed, legacy.Adam), (sequential, lambda: scaled(legacy.SGD(0.1, momentum=0.9)))]
    broadcast_cases.trains_unbuilt_models(world, kinds)
    broadcast_cases.resumes_on_the_first_rank(world, legacy.Adam)
    broadcast_cases.broadcasts_every_optimizer(world)


class Adding(legacy.Optimizer):
    """Adds gradients to variables."""

    def __init__(self, name: str = "Adding", **options: Any) -> None:
        super().__init__(name, **options)

    def _resource_apply_dense(self, grad: Any, var: Any, apply_state: Any = None) -> Any:
        return var.assign_add(grad)

    def get_config(self) -> dict[str, Any]:
        return dict(super().get_config())


@worlds("tf_keras", extended=True)
def check_what_scripts_call_on_a_wrapped_optimizer(world: World) -> None:
    wrapped_cases.aggregates_computed_gradients(world, Adding())
    wrapped_cases.reduces_a_computed_gradient_once(world, Adding())
    wrapped_cases.reduces_gradients_of_its_own(world, Adding())


@worlds("tf_keras", extended=True)
def check_broadcasts_that_would_hang_or_send_nothing(world: World) -> None:
    broadcast_cases.refuses_variables_that_differ(world)
    broadcast_cases.warns_of_broadcasts_without_weights(world)


@worlds("tf_keras", extended=True)
def check_synchronized_batch_normalization(world: World) -> None:
    """Outputs, moving averages and gradients are those of plain layers with the whole batch; masks and axes count."""
    whole = np.random.default_rng(2).standard_normal((4 * world.size, 3, 2)) * 3 + 1
    masks = np.arange(4 * world.size * 3).reshape(-1, 3) % 3 > 0
    rows = slice(4 * world.rank, 4 * (world.rank + 1))

    def outcome(layer: Any, samples: Any, mask: Any) -> list[np.ndarray]:
        inputs = tf.constant(samples)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            out = layer(inputs, training=True, **({} if mask is None else {"mask": tf.constant(mask)}))
            loss = tf.reduce_sum(tf.sin(out))
        return [out.numpy(), tape.gradient(loss, inputs).numpy(), *(v.numpy() for v in layer.variables)]

    for options, masked in (({}, False), ({}, True), ({"axis": [1, 2]}, False)):
        options = {"momentum": 0.5, "dtype": "float64", **options}
        plain = keras.layers.BatchNormalization(fused=False, **options)
        expected = outcome(plain, whole, masks if masked else None)
        expected[:2] = [each[rows] for each in expected[:2]]
        layer = hvd.SyncBatchNormalization(**options)
        found = outcome(layer, whole[rows], masks[rows] if masked else None)
        for value, reference in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-8, atol=1e-12)
        again = hvd.SyncBatchNormalization.from_config(layer.get_config())
        assert (again.momentum, again.fused) == (0.5, False)


@worlds("tf_keras", extended=True)
def check_fit_with_synchronized_batch_normalization(world: World) -> None:
    """Training is that of a plain layer with the whole batch, and the layer is saved with its model."""

    def trained(layer: Any, optimizer: Any, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Any:
        keras.utils.set_random_seed(3)
        wide = keras.layers.Dense(4, dtype="float64")
        model = keras.Sequential([keras.Input((3,)), wide, layer, keras.layers.Dense(1, dtype="float64")])
        keras.backend.set_floatx("float64")
        try:
            model.compile(optimizer, mean_square)
            x, y = (np.concatenate([each[i] for each in parts]).astype("float64") for i in (0, 1))
            model.fit(x, y, batch_size=len(parts[0][0]), shuffle=False, verbose=0)
        finally:
            keras.backend.set_floatx("float32")
        return model

    plain = trained(keras.layers.BatchNormalization(fused=False, dtype="float64"), KINDS[0](), batches())
    layer = hvd.SyncBatchNormalization(dtype="float64")
    mine = [part(world, batch) for batch in batches()]
    model = trained(layer, hvd.DistributedOptimizer(KINDS[0]()), mine)
    assert relative_error(weights_of(model), weights_of(plain)) <= TOLERANCE
    path = str(world.folder / f"legacy-normalized-{world.rank}.keras")
    model.save(path)
    loaded = hvd_keras.load_model(path, custom_objects={"mean_square": mean_square})
    assert type(loaded.layers[1]) is hvd.SyncBatchNormalization
    np.testing.assert_array_equal(loaded.predict(mine[0][0], verbose=0), model.predict(mine[0][0], verbose=0))


@worlds("tf_keras", extended=True)
def check_a_saved_model_goes_on(world: World) -> None:
    """Loaded wrapped, with as much of its optimizer's state as tf_keras saves: with SavedModels, and of legacy
    optimizers in `.keras` files, there is none. Without Horovod it is an ordinary model."""
    files = [(adam, "a.keras", STEPS), (KINDS[1], "b.h5", STEPS), (KINDS[1], "c.keras", 0), (KINDS[0], "folder", 0)]
    for kind, name, steps in files:
        model = model_of()
        model.compile(hvd.DistributedOptimizer(kind()), keras.losses.MeanSquaredError())
        model.fit(dataset(world), verbose=0, shuffle=False)
        path = str(world.folder / f"legacy-{name}")
        if world.rank == 0:
            model.save(path)
        world.gather(b"")
        loaded, plain = hvd_keras.load_model(path, legacy_opts=kind is KINDS[1]), keras.models.load_model(path)
        assert hvd.elastic.distribution_of(loaded.optimizer) is not None
        assert isinstance(loaded.optimizer, type(kind()))
        assert type(plain.optimizer) is type(kind())
        assert int(loaded.optimizer.iterations) == int(plain.optimizer.iterations) == steps
        if steps:
            for each in (model, loaded):
                each.fit(dataset(world), verbose=0, shuffle=False)
            agree(world, weights_of(loaded), weights_of(model))


@worlds("tf_keras", extended=True)
def check_best_model_checkpoint(world: World) -> None:
    model = model_of()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
    x, y = batches()[0]
    for weights_only, name in ((True, "w.h5"), (False, "m.h5"), (False, "m.keras")):
        best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=weights_only)
        best.filepath = str(world.folder / f"legacy-best-{world.rank}-{name}")
        model.fit(x, y, verbose=0, callbacks=[best])
        (model.load_weights if weights_only else keras.models.load_model)(best.filepath)


@worlds("tf_keras", extended=True)
def check_elastic_states(world: World) -> None:
    """What rank 0 has is synchronized; what was committed comes back, slots too."""
    for kind in KINDS:
        model = model_of(seed=world.rank)
        model.compile(hvd.DistributedOptimizer(kind()), mean_square)
        state = hvd_keras.elastic.KerasState(model, batch=0, epoch=world.rank)
        slot = model.optimizer.variables()[-1]
        assert slot.shape == model.trainable_variables[-1].shape, "slots are not part of the state"
        state.sync()
        assert state.epoch == 0
        assert world.same_everywhere(flat_bytes(weights_of(model)))
        callbacks = [
            hvd_keras.elastic.CommitStateCallback(state, batches_per_commit=2),
            hvd_keras.elastic.UpdateBatchStateCallback(state),
            hvd_keras.elastic.UpdateEpochStateCallback(state),
        ]
        model.fit(dataset(world).take(3), epochs=2, verbose=0, callbacks=callbacks)
        assert (state.batch, state.epoch) == (0, 2)
        kept, velocity = weights_of(model), slot.numpy()
        state.save()
        model.fit(dataset(world).take(3), verbose=0)
        assert not np.array_equal(slot.numpy(), velocity)
        state.restore()
        assert flat_bytes(kept) == flat_bytes(weights_of(model))
        np.testing.assert_array_equal(slot.numpy(), velocity)
