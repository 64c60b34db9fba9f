"""Horovod's collectives through the face: their options, objects, variables, process sets and refusals."""

import warnings
from typing import Any

import horovod.tensorflow as plain
import keras
import numpy as np
import tensorflow as tf
from world import World, refused
from worlds import worlds

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras


def filled(world: World, dtype: str, shape: list[int]) -> tf.Tensor:
    """A tensor that is rank + 1 everywhere."""
    return tf.cast(tf.fill(shape, world.rank + 1), dtype)


def total(world: World) -> int:
    return world.size * (world.size + 1) // 2


def both_ways(function: Any, *arguments: Any) -> list[Any]:
    """Call a function eagerly and compiled."""
    return [function(*arguments), tf.function(function, autograph=False)(*arguments)]


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_variables_defaults_and_older_names(world: World) -> None:
    value, average = keras.Variable(np.full((2, 2), world.rank + 1.0, "float32")), total(world) / world.size
    for options in ({}, {"op": hvd.Average, "process_set": hvd.global_process_set, "ignore_name_scope": True}):
        for result in both_ways(lambda options=options: hvd.allreduce(value, **options)):
            np.testing.assert_allclose(result, average, rtol=1e-6)
    for result in both_ways(lambda: hvd.reducescatter(tf.ones([world.size, 2]), compression=hvd.Compression.fp16)):
        np.testing.assert_allclose(result, [[1.0, 1.0]])
    assert hvd.grouped_allreduce([]) == []
    assert hvd.grouped_reducescatter([]) == []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        np.testing.assert_allclose(hvd.allreduce(value, average=False), total(world))
    assert any("replaced with `op`" in str(each.message) for each in caught)
    with refused("supersedes average", ValueError):
        hvd.allreduce(value, average=True, op=hvd.Sum)


class Halving:
    """A compressor as users write them."""

    @staticmethod
    def compress(tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        return tensor / 2, tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, context: Any) -> tf.Tensor:
        return tf.cast(tensor, context) * 2


@worlds("mpirun-2", "gloo-2", "gloo-1", "gloo-4", extended=True)
def check_a_compressor_of_ones_own(world: World) -> None:
    np.testing.assert_allclose(
        hvd.allreduce(filled(world, "float32", [3]), op=hvd.Sum, compression=Halving), total(world)
    )


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_objects(world: World) -> None:
    root = world.size - 1
    mine = {"rank": world.rank, "list": list(range(world.rank))}
    roots = {"rank": root, "list": list(range(root))}
    assert hvd.broadcast_object(mine, root_rank=root) == roots
    assert hvd.broadcast_object_fn(root_rank=root)(mine) == roots
    assert [each["rank"] for each in hvd.allgather_object(mine)] == list(range(world.size))


def adapted(world: World) -> Any:
    """A model that each rank has adapted to data of its own."""
    layer = keras.layers.Normalization(name="norm")
    layer.adapt(np.random.default_rng(world.rank).standard_normal((8, 2)).astype("float32"))
    return keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1, kernel_initializer="ones")])


@worlds("mpirun-2")
def check_broadcasts_of_adapted_layers(world: World) -> None:
    """Their outputs are the root's too, also where one step was compiled before; of variables alone they warn."""
    root, x = world.size - 1, np.ones((4, 2), "float32")
    model = adapted(world)
    model.compile(hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", jit_compile=False)
    model.fit(x, x[:, 0], verbose=0)
    model.fit(x, x[:, 0], verbose=0, callbacks=[hvd_keras.callbacks.BroadcastGlobalVariablesCallback(root)])
    assert world.same_everywhere(model.predict(x, verbose=0).tobytes())
    model = adapted(world)
    hvd.broadcast_variables(model, root_rank=root)
    assert world.same_everywhere(model(x).numpy().tobytes())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        hvd.broadcast_variables(adapted(world).variables, root_rank=root)
    texts = [str(each.message) for each in seen if "finalize_state" in str(each.message)]
    assert len(texts) == int(world.rank != root), texts
    assert all(text.startswith("norm") for text in texts)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_broadcast_variables(world: World) -> None:
    root = world.size - 1

    def start() -> list[Any]:
        plain = [tf.Variable(tf.ones(2, dtype) * world.rank) for dtype in ("float32", "int64", "float64")]
        return [*plain, keras.Variable(np.full(3, world.rank, "float32"))]

    for inplace in (False, True):
        variables = start()
        hvd.broadcast_variables(variables, root_rank=root, inplace=inplace)
        for variable in variables:
            np.testing.assert_array_equal(variable.numpy(), root)
    variables = start()
    more = start()

    @tf.function
    def of_model_and_optimizer() -> None:
        hvd.broadcast_variables(variables, root_rank=root)
        hvd.broadcast_variables(more, root_rank=root)

    of_model_and_optimizer()
    for variable in [*variables, *more]:
        np.testing.assert_array_equal(variable.numpy(), root)
    for value in both_ways(lambda: hvd.broadcast_(variables[:1], root)[0]):
        np.testing.assert_array_equal(value, root)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_what_a_rank_knows(world: World) -> None:
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (int(hvd.rank_op()), int(hvd.size_op())) == (world.rank, world.size)
    assert (int(hvd.local_rank_op()), int(hvd.local_size_op())) == (hvd.local_rank(), hvd.local_size())
    assert hvd.cross_size() == 1
    assert hvd.is_initialized()
    assert hvd.is_homogeneous()
    assert hvd.mpi_enabled() == (world.controller == "mpi")
    assert int(hvd.process_set_included_op()) == 1
    hvd.init()  # joined already


@worlds("mpirun-2", "gloo-2", "gloo-1", "gloo-4", extended=True)
def check_keras_values(world: World) -> None:
    values = [world.rank + 1.0, 2.0 * world.rank]
    np.testing.assert_allclose(hvd_keras.allreduce(values, op=hvd.Sum), [total(world), world.size * (world.size - 1)])
    traced = tf.function(lambda x: hvd_keras.allreduce(x, op=hvd.Sum))  # autograph adds to its locals
    np.testing.assert_allclose(traced(values), hvd_keras.allreduce(values, op=hvd.Sum))
    assert hvd_keras.allgather(values).shape == [2 * world.size]
    np.testing.assert_allclose(hvd_keras.broadcast(values, world.size - 1)[0], world.size)
    assert hvd_keras.reducescatter(np.ones((world.size, 2), "float32"), op=hvd.Sum).shape == [1, 2]


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-4", "mpirun-4", extended=True)
def check_process_sets(world: World) -> None:
    """Sets of some ranks; the others take no part, and the root counts among all."""
    with refused("duplicate process set", ValueError):
        hvd.add_process_set(list(range(world.size)))
    odd = [rank for rank in range(world.size) if rank % 2]
    among = hvd.add_process_set(odd)
    try:
        if among.included():
            assert (among.size(), among.rank()) == (len(odd), odd.index(world.rank))
            mine = filled(world, "float32", [2])
            summed = sum(rank + 1 for rank in odd)
            for result in both_ways(lambda: hvd.allreduce(mine, op=hvd.Sum, process_set=among)):
                np.testing.assert_allclose(result, summed)
            np.testing.assert_allclose(hvd.allreduce(mine, process_set=among), summed / len(odd))
            assert hvd.allgather(mine, process_set=among).shape == [2 * len(odd)]
            np.testing.assert_allclose(hvd.broadcast(mine, odd[-1], process_set=among), odd[-1] + 1)
            assert hvd.allgather_object(world.rank, process_set=among) == odd
            rows = tf.IndexedSlices(mine[:, tf.newaxis], tf.constant([0, world.rank]), tf.constant([9, 1]))
            np.testing.assert_allclose(
                tf.convert_to_tensor(hvd.allreduce(rows, process_set=among))[0], summed / len(odd)
            )
            with refused("non-global process sets", NotImplementedError):
                hvd.allreduce(mine, op=hvd.Adasum, process_set=among)
        variable = tf.Variable(float(world.rank))
        hvd.broadcast_variables([variable], root_rank=odd[0], process_set=among)
        assert float(variable) == (odd[0] if world.rank % 2 else world.rank)
    finally:
        world.gather(b"")
        assert hvd.remove_process_set(among)
    assert among.size() is None


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", "mpirun-4", extended=True)
def check_ranks_that_have_joined_count_as_zeros(world: World) -> None:
    for step in range(world.rank + 1):
        there = world.size - step
        np.testing.assert_allclose(hvd.allreduce(tf.ones(2), op=hvd.Sum), there)
    last = int(hvd.join())
    assert 0 <= last < world.size
    np.testing.assert_allclose(hvd.allreduce(tf.ones(2), op=hvd.Sum), world.size)


@worlds("mpirun-2", "gloo-2", "gloo-1", "gloo-4", extended=True)
def check_adasum_is_refused_where_it_would_fail(world: World) -> None:
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([4, 2]))
    if world.controller == "mpi" and world.size > 1:
        np.testing.assert_allclose(hvd.allreduce(tf.ones(3), op=hvd.Adasum), 1.0, rtol=1e-6)
        with refused("sparse_as_dense=True", NotImplementedError):
            hvd.allreduce(rows, op=hvd.Adasum)
    if world.controller != "mpi":
        with refused("Adasum needs MPI", NotImplementedError):
            hvd.allreduce(tf.ones(3), op=hvd.Adasum)
    with refused("Only Sum and Average", NotImplementedError):
        hvd.allreduce(rows, op=hvd.Max)
    with refused("not supported with tf.IndexedSlices", NotImplementedError):
        hvd.allreduce(rows, prescale_factor=2.0)


def rows(world: World) -> tf.IndexedSlices:
    """The row 1 on every rank, twice, and one of this rank's own."""
    indices = tf.constant([1, 1, 2 + world.rank])
    return tf.IndexedSlices(tf.ones([3, 2]), indices, tf.constant([8, 2]))


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


@worlds("mpirun-2", "gloo-2", "gloo-1", "gloo-4", extended=True)
def check_a_timeline_is_to_be_asked_for(world: World) -> None:
    with refused("HOROVOD_TIMELINE=DYNAMIC", ValueError):
        hvd.start_timeline("timeline.json")
