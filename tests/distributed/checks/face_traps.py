"""What fails with plain Horovod on Keras 3, without a word or in the middle of a run, and works through the face."""

from typing import Any

import horovod.tensorflow as plain
import horovod.tensorflow.keras as plain_keras
import keras
import numpy as np
import tensorflow as tf
from world import World, flat_bytes
from worlds import worlds

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras


def fails(call: Any) -> bool:
    """Tell whether a call raises."""
    try:
        call()
    except Exception:
        return True
    return False


def small_model(seed: int = 3) -> Any:
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


def fitted(world: World, optimizer: Any) -> bytes:
    """Weights after a few steps on data of this rank's own."""
    model = small_model()
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(world.rank)
    model.fit(rng.standard_normal((8, 2)), rng.standard_normal((8, 1)), batch_size=4, verbose=0)
    return flat_bytes(model.get_weights())


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_the_optimizer_reduces(world: World) -> None:
    drifted = fitted(world, plain_keras.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    assert not world.same_everywhere(drifted)
    assert world.same_everywhere(fitted(world, hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.1))))


def rows(world: World) -> tf.IndexedSlices:
    """The row 1 on every rank, twice, and one of this rank's own."""
    indices = tf.constant([1, 1, 2 + world.rank])
    return tf.IndexedSlices(tf.ones([3, 2]), indices, tf.constant([8, 2]))


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_dense_before_sparse_in_a_group(world: World) -> None:
    mixed = [tf.ones(3), rows(world), tf.ones(2, tf.float64), rows(world)]
    assert fails(lambda: plain.grouped_allreduce(mixed[:2], op=plain.Sum))
    dense, sparse, wide, more = hvd.grouped_allreduce(mixed, op=hvd.Sum)
    np.testing.assert_allclose(dense, world.size)
    np.testing.assert_allclose(wide, world.size)
    for result in (sparse, more):
        np.testing.assert_allclose(tf.convert_to_tensor(result)[1], 2 * world.size)
        np.testing.assert_allclose(tf.convert_to_tensor(result)[2], 1)


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_rows_come_back_once(world: World) -> None:
    """Keras' Adam takes a row that stands twice for two steps."""
    repeated = plain.allreduce(rows(world))
    once = hvd.allreduce(rows(world))
    assert len(set(repeated.indices.numpy())) < len(repeated.indices)
    assert len(set(once.indices.numpy())) == len(once.indices)
    np.testing.assert_allclose(tf.convert_to_tensor(once), tf.convert_to_tensor(repeated), rtol=1e-6)

    def applied(gradient: Any) -> Any:
        table = keras.Variable(np.zeros((8, 2), "float32"))
        optimizer = keras.optimizers.Adam(0.1)
        for _ in range(3):
            optimizer.apply([gradient], [table])
        return table.numpy()

    reference = applied(tf.convert_to_tensor(once))
    np.testing.assert_allclose(applied(once), reference, atol=1e-6)
    assert np.abs(applied(repeated) - reference).max() > 1e-2


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_bfloat16(world: World) -> None:
    """Moved exactly; reduced in float32 and rounded once."""
    mine = tf.cast(tf.fill([3], 1.0 + world.rank / 128), tf.bfloat16)
    assert fails(lambda: plain.allreduce(mine))
    exact = tf.cast(sum(1.0 + rank / 128 for rank in range(world.size)), tf.float32)
    summed = hvd.allreduce(mine, op=hvd.Sum)
    assert summed.dtype == tf.bfloat16
    np.testing.assert_array_equal(tf.cast(summed, tf.float32), tf.cast(tf.cast(exact, tf.bfloat16), tf.float32))
    gathered = tf.cast(hvd.allgather(mine), tf.float32)
    np.testing.assert_array_equal(gathered, np.repeat(1.0 + np.arange(world.size) / 128, 3).astype("float32"))
    variable = keras.Variable(np.ones(2), dtype="bfloat16")
    for groups in (None, 1):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.value) * float(world.rank + 1)
        gradient = hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, [variable])[0]
        np.testing.assert_allclose(tf.cast(gradient, tf.float32), (world.size + 1) / 2)


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_what_broke_with_keras_3(world: World) -> None:
    """Plain Horovod's callbacks, layer, states and loading, each in the smallest use there is."""
    model = small_model()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.MeanSquaredError())
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")

    def fit(callback: Any) -> None:
        model.fit(x, y, verbose=0, callbacks=[callback])

    path = str(world.folder / f"trap-{world.rank}.keras")
    model.save(path)
    uses = [
        lambda api: fit(api.callbacks.BroadcastGlobalVariablesCallback(0)),
        lambda api: fit(api.callbacks.MetricAverageCallback()),
        lambda api: fit(api.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1)),
        lambda api: fit(api.callbacks.LearningRateScheduleCallback(0.1, 1.0)),
        lambda api: api.callbacks.BestModelCheckpoint(),
        lambda api: api.elastic.KerasState(model),
    ]
    variable = keras.Variable(np.ones(2, "float32"))

    def gradient(api: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable.value)
        return api.DistributedGradientTape(tape).gradient(loss, [variable])

    assert fails(lambda: gradient(plain))
    np.testing.assert_allclose(gradient(hvd), [[1.0, 1.0]])
    for number, use in enumerate(uses):
        assert fails(lambda use=use: use(plain_keras)), number
        use(hvd_keras)
    assert fails(lambda: plain.SyncBatchNormalization()(x, training=True))
    assert hvd.SyncBatchNormalization()(x, training=True).shape == x.shape
    assert fails(plain.broadcast_object_fn)
    assert hvd.broadcast_object_fn()(5) == 5
    loaded = [type(api.load_model(path).optimizer) for api in (plain_keras, hvd_keras)]
    assert [issubclass(kind, keras.optimizers.SGD) for kind in loaded] == [True, True]
    assert [kind is keras.optimizers.SGD for kind in loaded] == [True, False]
