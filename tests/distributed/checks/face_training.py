"""Horovod's optimizer, tape, callbacks, load_model and elastic state through the face, against one process."""

from typing import Any

import numpy as np
import tensorflow as tf
from checks.face_cases import (
    IS_LEGACY,
    MOMENTA,
    SGDS,
    adam,
    agree,
    alone,
    batches,
    dataset,
    in_fit,
    legacy_adam,
    mean_square,
    model_of,
    part,
    weights_of,
)
from world import World, flat_bytes, refused
from worlds import worlds

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras
from hvdtrain.config.errors import ConfigError

keras = tf.keras


@worlds("mpirun-2", "gloo-2")
@worlds("tf_keras", extended=True)
def check_fit_is_training_in_one_process(world: World) -> None:
    for kind in (*MOMENTA, *([adam, legacy_adam] if IS_LEGACY else [])):
        agree(world, in_fit(world, hvd_keras.DistributedOptimizer(kind())), world.reference(alone, kind))


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


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
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


@worlds("mpirun-2", "gloo-2", "tf_keras", extended=True)
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
    for kind in SGDS:
        optimizer = hvd_keras.PartialDistributedOptimizer(kind(1.0), local_layers=local, scale_local_gradients=False)
        before = local.kernel.numpy()
        optimizer.apply_gradients([(tf.fill(local.kernel.shape, tf.cast(world.rank, tf.float64)), local.kernel)])
        np.testing.assert_allclose(local.kernel.numpy(), before - world.rank)


@worlds("mpirun-2", "gloo-2", "gloo-4", extended=True)
def check_an_optimizer_of_a_process_set(world: World) -> None:
    """Ranks outside of the set apply their own gradients."""
    first_two = hvd.add_process_set([0]) if world.size == 2 else hvd.add_process_set([0, 1])
    variable = tf.Variable([0.0])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=first_two)
    optimizer.apply([tf.constant([world.rank + 1.0])], [keras.Variable(variable.numpy(), name="apart")])
    kept = float(optimizer._trainable_variables[0].numpy()[0])
    expected = {2: [1.0, 2.0], 4: [1.5, 1.5, 3.0, 4.0]}[world.size][world.rank]
    world.gather(b"")
    hvd.remove_process_set(first_two)
    assert kept == -expected, kept


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
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


@worlds("mpirun-2")
@worlds("gloo-2", "tf_keras", extended=True)
def check_the_callbacks(world: World) -> None:
    """Figures are averages, and rates go up to what they should and down again."""
    for kind in SGDS:
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
        partly = {"loss": 1.0, **({} if world.rank else {"val_loss": 2.0})}
        with refused(r"Received: no 'val_loss' on rank 1. Pass validation_data to fit on every rank.", ConfigError):
            average.on_epoch_end(0, partly)


@worlds("mpirun-2", "gloo-2", extended=True)
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


@worlds("mpirun-2", "gloo-2", extended=True)
def check_an_elastic_state_of_variables(world: World) -> None:
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


@worlds("mpirun-2")
@worlds("gloo-2", "tf_keras", extended=True)
def check_an_elastic_state_of_a_model(world: World) -> None:
    """The same, slots too."""
    for kind in MOMENTA:
        model = model_of(seed=world.rank)
        model.compile(hvd.DistributedOptimizer(kind()), mean_square)
        state = hvd_keras.elastic.KerasState(model, batch=0, epoch=world.rank)
        variables = model.optimizer.variables
        slot = (variables() if callable(variables) else variables)[-1]
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
