"""The options of Horovod's optimizer through the face, and its callbacks and load_model in more detail."""

from typing import Any

import numpy as np
import tensorflow as tf
from checks import broadcast_cases, wrapped_cases
from checks.face_cases import (
    BATCH,
    IS_LEGACY,
    MOMENTA,
    SGDS,
    STEPS,
    TOLERANCE,
    adam,
    agree,
    alone,
    batches,
    data,
    dataset,
    in_fit,
    in_own_loop,
    leaves_local_variables,
    mean_square,
    model_of,
    momentum,
    momentum_of_sums,
    part,
)
from world import World, refused
from worlds import worlds

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras

keras = tf.keras


@worlds("mpirun-2", "tf_keras", extended=True)
def check_own_loops_are_training_in_one_process(world: World) -> None:
    for kind in MOMENTA if IS_LEGACY else [adam]:
        expected = world.reference(alone, kind)
        for way in ("apply_gradients", "compute_gradients", "minimize" if IS_LEGACY else "apply"):
            agree(world, in_own_loop(world, hvd.DistributedOptimizer(kind()), way), expected)
        agree(world, in_own_loop(world, hvd.DistributedOptimizer(kind()), compiled=False), expected)
        agree(world, in_own_loop(world, kind(), "tape"), expected)


@worlds("mpirun-2", "tf_keras", extended=True)
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
        agree(world, in_own_loop(world, hvd.DistributedOptimizer(momentum(), **options)), expected, tolerance)
    summed = SGDS[-1](0.05 / world.size, momentum=0.9)
    way = "minimize" if IS_LEGACY else "apply"
    agree(world, in_own_loop(world, hvd.DistributedOptimizer(summed, op=hvd.Sum), way), expected)


@worlds("mpirun-2", extended=True)
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


@worlds("mpirun-2", "tf_keras", extended=True)
def check_backward_passes_per_step(world: World) -> None:
    """Two batches and one update are a batch twice as large, or their sum, and one step of the optimizer."""
    for kind in (*MOMENTA, adam):
        averaging = hvd.DistributedOptimizer(kind(), backward_passes_per_step=2, average_aggregated_gradients=True)
        agree(world, in_fit(world, averaging), world.reference(alone, kind, 2 * BATCH))
        assert int(averaging.iterations) == STEPS // 2
    summed = world.reference(alone, momentum_of_sums, 2 * BATCH)
    eagerly = [] if IS_LEGACY else [("apply_gradients", False)]  # takes minutes there
    for way, compiled in (("apply_gradients", True), ("compute_gradients", True), *eagerly):
        summing = hvd.DistributedOptimizer(momentum(), backward_passes_per_step=2)
        agree(world, in_own_loop(world, summing, way, compiled=compiled), summed)
        assert int(summing.iterations) == STEPS // 2


@worlds("mpirun-2", extended=True)
def check_xla_is_refused_in_words(world: World) -> None:
    variable = tf.Variable([1.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.build([kept := keras.Variable([1.0], name="xla")])
    with refused("jit_compile=False", ValueError):
        tf.function(lambda: optimizer.apply([variable * 1.0], [kept]), jit_compile=True, autograph=False)()


@worlds("mpirun-2", "tf_keras", extended=True)
def check_momentum_is_corrected(world: World) -> None:
    """Velocities follow the rate: v <- momentum (new / old) v - new g."""
    weight = velocity = 0.0
    for old, new in ((0.1, 0.1), (0.1, 0.01), (0.01, 0.001)):
        velocity = 0.5 * new / old * velocity - new
        weight += velocity
    for kind in SGDS:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((1,)), dense])
        model.compile(hvd.DistributedOptimizer(kind(0.1, momentum=0.5)), lambda y, out: tf.reduce_sum(out))
        schedule = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.1)
        ones = np.ones((1, 1), "float32")
        model.fit(ones, ones, epochs=3, verbose=0, callbacks=[schedule])
        np.testing.assert_allclose(model.get_weights()[0], weight, rtol=1e-5)


@worlds("mpirun-2", "tf_keras", extended=True)
def check_broadcast_leaves_local_variables(world: World) -> None:
    leaves_local_variables(world, hvd.DistributedOptimizer(SGDS[-1](0.0)), mean_square)


def scaled() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))


@worlds("mpirun-2", extended=True)
def check_models_that_are_built_in_the_first_step(world: World) -> None:
    cases = [(broadcast_cases.sequential, adam), (broadcast_cases.Subclassed, scaled)]
    broadcast_cases.trains_unbuilt_models(world, cases)
    broadcast_cases.resumes_on_the_first_rank(world, adam)
    broadcast_cases.broadcasts_every_optimizer(world)


class Adding(keras.optimizers.Optimizer):
    """Adds gradients to variables."""

    def __init__(self, learning_rate: float = 1.0, **options: Any) -> None:
        super().__init__(learning_rate, **options)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        variable.assign_add(gradient)


@worlds("mpirun-2", extended=True)
def check_what_scripts_call_on_a_wrapped_optimizer(world: World) -> None:
    wrapped_cases.aggregates_computed_gradients(world, Adding())
    wrapped_cases.reduces_a_computed_gradient_once(world, Adding())
    wrapped_cases.reduces_gradients_of_its_own(world, Adding())


@worlds("mpirun-2", "tf_keras", extended=True)
def check_broadcasts_that_would_hang_or_send_nothing(world: World) -> None:
    broadcast_cases.refuses_variables_that_differ(world)
    broadcast_cases.warns_of_broadcasts_without_weights(world)


class Renamed(keras.optimizers.SGD):
    """An optimizer that Keras does not know."""


@worlds("mpirun-2", extended=True)
def check_a_saved_model_goes_on(world: World) -> None:
    """Loaded with its optimizer's state, wrapped; and without Horovod it is an ordinary model."""
    for kind, ending in ((adam, "h5"), (lambda: Renamed(0.05, momentum=0.9), "keras")):
        model = model_of()
        model.compile(hvd.DistributedOptimizer(kind()), keras.losses.MeanSquaredError())
        model.fit(dataset(world), verbose=0, shuffle=False)
        name = type(model.optimizer).__name__
        path = world.folder / f"face-{name}.{ending}"
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


@worlds("mpirun-2", extended=True)
def check_best_model_checkpoint(world: World) -> None:
    model = model_of()
    model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
    best = hvd_keras.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=True)
    best.filepath = str(world.folder / f"best-{world.rank}.weights.h5")
    x, y = data()
    model.fit(x, y, verbose=0, callbacks=[best])
    model.load_weights(best.filepath)
