"""DistributedGradientTape and broadcast_variables in a user's own loop."""

from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from builders import BATCH, SAMPLES, dense_data, dense_model, per_sample
from world import World, flat_bytes, grappler, moved, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.order import Order
from hvdtrain.runtime import collectives


def gradient_of(world: World, variable: Any, **options: Any) -> Any:
    """Gradient of (rank + 1) * sum(variable * [1, 2, 3])."""
    with tf.GradientTape() as tape:
        loss = float(world.rank + 1) * tf.reduce_sum(tf.convert_to_tensor(variable) * tf.constant([1.0, 2.0, 3.0]))
    return hvdtrain.DistributedGradientTape(tape, **options).gradient(loss, [variable])[0]


def total(world: World) -> float:
    return world.size * (world.size + 1) / 2


def both_ways(function: Any, *arguments: Any, **options: Any) -> list[Any]:
    """Call a function eagerly and compiled."""
    return [function(*arguments, **options), tf.function(lambda: function(*arguments, **options), autograph=False)()]


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", "mpirun-4", extended=True)
def check_average_and_sum_on_both_kinds_of_variable(world: World) -> None:
    kinds = [tf.Variable(tf.ones(3), name="plain"), keras.Variable(np.ones(3, "float32"), name="kept")]
    for variable in kinds:
        for op, expected in (("average", total(world) / world.size), ("sum", total(world))):
            for value in both_ways(gradient_of, world, variable, op=op):
                np.testing.assert_allclose(value, expected * np.array([1, 2, 3]), rtol=1e-6)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", extended=True)
def check_structures_none_and_float64(world: World) -> None:
    a, b, unused = (tf.Variable(tf.ones(2, tf.float64), name=name) for name in "abc")

    def gradient() -> Any:
        with hvdtrain.DistributedGradientTape() as tape:
            loss = tf.reduce_sum(a * tf.cast(world.rank, tf.float64) + b)
        return tape.gradient(loss, {"a": a, "more": [b, unused]})

    for value in both_ways(gradient):
        np.testing.assert_allclose(value["a"], [(world.size - 1) / 2] * 2)
        np.testing.assert_allclose(value["more"][0], [1, 1])
        assert value["more"][1] is None


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", extended=True)
def check_groups_and_predivide(world: World) -> None:
    variables = [tf.Variable(tf.ones(3) * i, name=f"v{i}") for i in range(5)]
    variables.append(tf.Variable(tf.ones(3, tf.float64), name="wide"))

    def gradient(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            parts = [tf.cast(tf.reduce_sum(v * v), tf.float32) for v in variables]
            loss = float(world.rank + 1) * tf.add_n(parts)
        return hvdtrain.DistributedGradientTape(tape, **options).gradient(loss, variables)

    plain = gradient()
    settings: list[dict[str, Any]] = [
        {"groups": 2},
        {"groups": 99},
        {"groups": [variables[:2], [variables[3], variables[5]]]},
        {"gradient_predivide_factor": 2.0},
    ]
    for options in settings:
        for values in both_ways(gradient, **options):
            for value, expected in zip(values, plain, strict=True):
                np.testing.assert_allclose(value, expected, rtol=1e-6)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", extended=True)
def check_half_precision_on_the_wire_does_not_overflow(world: World) -> None:
    variable = tf.Variable(tf.ones(3), name="large")

    def gradient(op: str) -> Any:
        with tf.GradientTape() as tape:
            loss = 60000.0 * tf.reduce_sum(variable)
        return hvdtrain.DistributedGradientTape(tape, op=op, compression="fp16").gradient(loss, [variable])[0]

    # A half has 11 significant bits: relative rounding of 2^-11 at each end.
    for op, factor in (("average", 1), ("sum", world.size)):
        for value in both_ways(gradient, op):
            np.testing.assert_allclose(value, 60000.0 * factor, rtol=2**-10)


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", "mpirun-4", extended=True)
def check_sparse_gradients_sum_duplicates(world: World) -> None:
    table = tf.Variable(tf.zeros([6, 2]), name="table")
    rows = tf.constant([1, 1, 2 + world.rank % 2])

    def gradient(**options: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows))
        return hvdtrain.DistributedGradientTape(tape, op="sum", **options).gradient(loss, [table])[0]

    expected = np.zeros((6, 2))
    expected[1] = 2 * world.size
    for rank in range(world.size):
        expected[2 + rank % 2] += 1
    # A table of this size travels dense unless it is told otherwise.
    for value in both_ways(gradient, sparse_as_dense=False):
        assert isinstance(value, tf.IndexedSlices)
        assert len(set(value.indices.numpy())) == len(value.indices), "rows stand more than once"
        np.testing.assert_allclose(tf.convert_to_tensor(value), expected)
    for value in [*both_ways(gradient), *both_ways(gradient, sparse_as_dense=True)]:
        assert tf.is_tensor(value)
        np.testing.assert_allclose(value, expected)


def adasum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Maleki et al. 2020, equation 5: each vector loses half of its part along the other."""
    dot = float(a @ b)
    return (1 - dot / (2 * float(a @ a))) * a + (1 - dot / (2 * float(b @ b))) * b


def check_adasum_follows_its_formula(world: World) -> None:
    """For two ranks; Horovod has Adasum on MPI only."""
    vectors = [np.array([1.0, 2.0, -1.0], "float32"), np.array([0.5, 1.0, 3.0], "float32")]
    variable = tf.Variable(tf.zeros(3), name="adasum")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * vectors[world.rank])
    value = hvdtrain.DistributedGradientTape(tape, op="adasum").gradient(loss, [variable])[0]
    np.testing.assert_allclose(value, adasum(*vectors), rtol=1e-5)


def check_options_that_exclude_one_another(world: World) -> None:
    for options in (
        {"op": "mean"},
        {"compression": "int8"},
        {"groups": -1},
        {"op": "adasum", "gradient_predivide_factor": 2.0},
        {"op": "adasum", "groups": 2},
        {"gradient_predivide_factor": 0.0},
    ):
        try:
            hvdtrain.DistributedGradientTape(**options)
        except ConfigError:
            continue
        raise AssertionError(f"{options} were accepted")


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_broadcast_of_every_dtype(world: World) -> None:
    root = world.size - 1
    dtypes = ["float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "uint32", "bool"]
    variables = [tf.Variable(tf.cast(tf.fill([3], world.rank + 1), t), name=f"of_{t}") for t in dtypes]
    variables.append(keras.Variable(np.full(2, world.rank, "float32"), name="kept"))
    hvdtrain.broadcast_variables(variables, root_rank=root)
    for variable in variables[:-1]:
        expected = tf.cast(tf.fill([3], root + 1), variable.dtype)
        assert bool(tf.reduce_all(variable == expected)), variable
    np.testing.assert_array_equal(variables[-1].numpy(), [root, root])


def check_variables_of_a_broadcast_share_messages(world: World) -> None:
    """Of any shape and number, where some are larger than a message, in another order on each rank."""
    shapes: list[list[int]] = [[], [0], [3], [4, 5], [2, 1, 3], [70], [16], [1]]
    names = {
        f"{number}/{dtype}": (shape, dtype) for number, shape in enumerate(shapes) for dtype in ("float32", "int64")
    }
    order = list(names)[:: 1 if world.rank % 2 else -1]
    for limit in (1, 100, 2**20):
        variables = {name: tf.Variable(tf.fill(*_shape_and(world.rank, names[name]))) for name in order}
        with mock.patch.object(collectives, "PACKED_BYTES", limit):
            world.backend.broadcast(variables, root=world.size - 1)
        for name, variable in variables.items():
            expected = tf.fill(*_shape_and(world.size - 1, names[name]))
            np.testing.assert_array_equal(variable, expected, err_msg=f"{name}, {limit} bytes")


def _shape_and(rank: int, kind: tuple[list[int], str]) -> tuple[list[int], tf.Tensor]:
    shape, dtype = kind
    return shape, tf.constant(7 * rank + len(shape), dtype)


@worlds("mpirun-2")
@worlds("gloo-2", "gloo-1", "gloo-4", extended=True)
@grappler()
def check_a_loop_of_ones_own(world: World) -> None:
    """The tape and a Keras optimizer in a compiled step keep the ranks equal."""
    keras.utils.set_random_seed(100 + world.rank)
    normalization = keras.layers.Normalization()
    normalization.adapt(np.random.default_rng(world.rank).standard_normal((8, 4)).astype("float32"))
    model = keras.Sequential([keras.Input((4,)), normalization, keras.layers.Dense(3), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(model.trainable_variables)
    hvdtrain.broadcast_variables(model)
    hvdtrain.broadcast_variables(optimizer.variables)
    x = np.random.default_rng(world.rank).standard_normal((8, 4)).astype("float32")

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        with hvdtrain.DistributedGradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x) - 1.0))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    first, *_, last = (float(step()) for _ in range(30))
    assert last < first
    weights = b"".join(np.ascontiguousarray(w).tobytes() for w in model.get_weights())
    assert world.same_everywhere(weights + model(np.ones((2, 4), "float32")).numpy().tobytes())


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "mpirun-1", "gloo-4", extended=True)
def check_a_loop_on_a_sharded_dataset_trains_as_one_process_does(world: World) -> None:
    """`hvdtrain.shard` and `ShardedOrder` with the tape: the same steps on every rank, and those of whole batches."""
    x, y = dense_data("float64")
    whole = SAMPLES // BATCH * BATCH
    order = Order(whole, BATCH, 7)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).map(lambda row, label: (2 * row, label))
    indices = hvdtrain.ShardedOrder(whole, BATCH, seed=7)
    loops: dict[str, tuple[list[Any], list[Any]]] = {
        "shard": (
            list(hvdtrain.shard(dataset, batch=BATCH, drop_remainder=True)),
            [(2 * x[n : n + BATCH], y[n : n + BATCH]) for n in range(0, whole, BATCH)],
        ),
        "order": (
            [(x[rows], y[rows]) for rows in indices.indices(1)],
            [(x[rows], y[rows]) for rows in np.split(order.numbers(1, np.arange(whole)).numpy(), whole // BATCH)],
        ),
    }
    for name, (mine, batches) in loops.items():
        model, optimizer = dense_model("float64", 0), keras.optimizers.SGD(0.1)
        for inputs, targets in mine:
            with hvdtrain.DistributedGradientTape(exchange=world.backend) as tape:
                mean = tf.reduce_mean(per_sample(targets, model(inputs, training=True)))
            optimizer.apply(tape.gradient(mean, model.trainable_variables), model.trainable_variables)
        expected = plain_training(dense_model("float64", 0), keras.optimizers.SGD(0.1), per_sample, batches)
        assert moved(expected, dense_model("float64", 0).get_weights()) > 1e-2, name
        assert relative_error(model.get_weights(), expected) <= 1e-9, name
        assert world.same_everywhere(flat_bytes(model.get_weights())), name
    steps = [len(list(hvdtrain.shard(dataset, batch=BATCH))), len(hvdtrain.ShardedOrder(SAMPLES, BATCH))]
    assert steps == [5, 5], steps
