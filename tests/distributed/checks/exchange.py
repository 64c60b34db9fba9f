"""What TensorFlow's graph optimizer must not do to Horovod's ops, and what the ranks' data looks like together."""

import json

import keras
import numpy as np
import tensorflow as tf
from world import World, grappler
from worlds import worlds

import hvdtrain
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.pipeline import SourceTraining


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", extended=True)
@grappler()
def check_equal_inputs_are_not_merged_and_constants_not_folded(world: World) -> None:
    exchange = world.backend
    calls = tf.Variable(0, dtype=tf.int32)

    @tf.function(autograph=False)
    def reduce_all(x: tf.Tensor) -> list[tf.Tensor]:
        calls.assign_add(1)
        first = exchange.all_reduce(x, name="trap/first")
        second = exchange.all_reduce(x, name="trap/second")
        constant = exchange.all_reduce(tf.zeros([2]) + 3.0, name="trap/constant")
        return [first, second, constant]

    x = tf.fill([2], float(world.rank + 1))
    # Earlier checks' functions are among them.
    left = [name for name in optimized_collectives(reduce_all, x) if "trap" in name]
    if world.size > 1:
        assert len(set(left)) == 3, left
    for _ in range(3):
        first, second, constant = reduce_all(x)
        expected = world.size * (world.size + 1) / 2
        np.testing.assert_allclose([first, second], expected)
        np.testing.assert_allclose(constant, 3.0 * world.size)


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_messages_of_any_size_add_up(world: World) -> None:
    """Integers, which add up exactly; the largest take another way (see `openmpi-allreduce.conf`)."""
    for count in (1, 1000, 1_100_003, 5_000_011):
        mine = tf.cast(tf.range(count) % 1000 + world.rank, tf.float32)
        total = world.backend.all_reduce(mine, name=f"size/{count}").numpy()
        ranks = sum(range(world.size))
        np.testing.assert_array_equal(total, world.size * (np.arange(count) % 1000) + ranks)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
@grappler()
def check_what_is_constant_on_one_rank_is_exchanged_every_time(world: World) -> None:
    """Folded into its first result, it would leave the other ranks waiting at the second call."""
    exchange, last = world.backend, world.rank == world.size - 1

    @tf.function(autograph=False)
    def exchanged(x: tf.Tensor) -> list[tf.Tensor]:
        mine = tf.constant([2.0]) if last else x
        total = exchange.all_reduce(mine, name="fold/reduce")
        (grouped,) = exchange.grouped_all_reduce([mine], name="fold/grouped")
        gathered = exchange.all_gather(mine, name="fold/gather")
        words = exchange.all_to_all(tf.tile(mine, [world.size]), name="fold/all_to_all")
        return [total, grouped, tf.reduce_sum(gathered), tf.reduce_sum(words)]

    for call in range(3):
        value = 2.0 if world.size == 1 else float(call)
        total = 2.0 + (world.size - 1) * value
        for result, expected in zip(exchanged(tf.constant([float(call)])), [total] * 4, strict=True):
            np.testing.assert_allclose(result, expected)


def optimized_collectives(function: tf.types.experimental.PolymorphicFunction, x: tf.Tensor) -> list[str]:
    """The Horovod ops that are left after the graph optimizer has run."""
    from tensorflow.python.eager import context

    context.enable_run_metadata()
    function(x)
    metadata = context.export_run_metadata()
    context.disable_run_metadata()
    return [
        node.name
        for graphs in metadata.function_graphs
        for node in graphs.post_optimization_graph.node
        if node.op.startswith("Horovod")
    ]


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
def check_every_sample_once_in_an_order_that_ignores_the_world(world: World) -> None:
    samples, batch = 53, 8  # a tail of 5 samples: with 4 ranks uneven
    source = ArraySource((np.arange(samples), np.zeros(samples)))
    mine = SourceTraining(source, batch=batch, index=world.rank, size=world.size, seed=11)
    alone = SourceTraining(source, batch=batch, index=0, size=1, seed=11)
    steps = 2 * mine.steps_per_epoch
    part = [read(stream) for stream in take(mine, steps)]
    parts = [json.loads(text) for text in world.gather(json.dumps(part).encode())]
    together = [[sample for rank in parts for sample in rank[step]] for step in range(steps)]
    assert together == [read(stream) for stream in take(alone, steps)]
    for epoch in range(2):
        seen = [s for step in together[epoch * alone.steps_per_epoch :][: alone.steps_per_epoch] for s in step]
        assert sorted(seen) == list(range(samples))
    resumed = [read(stream) for stream in take(mine, 4, start=3)]
    assert resumed == part[3:7]


def take(data: SourceTraining, count: int, start: int = 0) -> list:
    batches = data.batches(start)
    return [next(batches) for _ in range(count)]


def read(batch) -> list[int]:
    return [int(sample) for sample in batch.inputs] if float(batch.has_samples) else []


@worlds("mpirun-2", "gloo-2", "gloo-4")
@worlds("gloo-1", extended=True)
def check_a_rank_without_samples(world: World) -> None:
    """One sample in the last batch: the other ranks hold a placeholder that counts for nothing."""
    x = np.arange(9, dtype="float32").reshape(9, 1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.0), "mse", backend=world.backend)
    outcome = trainer.evaluate((x, np.zeros((9, 1), "float32")), batch=4, return_dict=True)
    np.testing.assert_allclose(outcome["loss"], np.mean(np.arange(9.0) ** 2), rtol=1e-6)
