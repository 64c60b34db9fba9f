"""The face under TF_USE_LEGACY_KERAS=1, where tf_keras has something that Keras 3 does not; the rest: face_variants."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from checks import broadcast_cases, wrapped_cases
from checks.face_cases import (
    STEPS,
    TOLERANCE,
    adam,
    agree,
    alone,
    batches,
    dataset,
    in_fit,
    legacy_momentum,
    mean_square,
    model_of,
    momentum,
    part,
    weights_of,
)
from world import World, flat_bytes, relative_error
from worlds import worlds

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras

keras = tf.keras
legacy = keras.optimizers.legacy


@worlds("tf_keras", extended=True)
def check_tf_keras_is_the_keras_of_this_process(world: World) -> None:
    assert keras.Model.__module__.startswith("tf_keras.")
    assert issubclass(hvd.SyncBatchNormalization, keras.layers.BatchNormalization)


@worlds("tf_keras", extended=True)
def check_a_rank_that_trains_alone_differs(world: World) -> None:
    """The comparison notices an optimizer that does not reduce."""
    weights = in_fit(world, momentum())
    assert relative_error(weights, world.reference(alone, momentum)) > 1e-3
    assert not world.same_everywhere(flat_bytes(weights))


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

    plain = trained(keras.layers.BatchNormalization(fused=False, dtype="float64"), momentum(), batches())
    layer = hvd.SyncBatchNormalization(dtype="float64")
    mine = [part(world, batch) for batch in batches()]
    model = trained(layer, hvd.DistributedOptimizer(momentum()), mine)
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
    files = [
        (adam, "a.keras", STEPS),
        (legacy_momentum, "b.h5", STEPS),
        (legacy_momentum, "c.keras", 0),
        (momentum, "folder", 0),
    ]
    for kind, name, steps in files:
        model = model_of()
        model.compile(hvd.DistributedOptimizer(kind()), keras.losses.MeanSquaredError())
        model.fit(dataset(world), verbose=0, shuffle=False)
        path = str(world.folder / f"legacy-{name}")
        if world.rank == 0:
            model.save(path)
        world.gather(b"")
        loaded, plain = hvd_keras.load_model(path, legacy_opts=kind is legacy_momentum), keras.models.load_model(path)
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
