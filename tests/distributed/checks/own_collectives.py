"""`hvdtrain.allreduce`, `hvdtrain.all_gather` and the like on real ranks, against NumPy."""

import contextlib
import threading
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checks.tape import both_ways, total
from world import World, grappler, refused, relative_error
from worlds import worlds

import hvdtrain
import hvdtrain.horovod as hvd
from hvdtrain.config.errors import ConfigError


def mine(rank: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(rank).standard_normal((rows, 3))


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-4", extended=True)
@grappler()
def check_collectives_of_scripts(world: World) -> None:
    """Eagerly and in a tf.function, of Keras variables, of every op."""
    ranks, size = range(world.size), world.size
    everything = np.stack([mine(rank) for rank in ranks])
    variable = keras.Variable(mine(world.rank), dtype="float64")
    ragged = tf.constant(mine(world.rank, world.rank + 1))
    sizes = [rank + 1 for rank in ranks]
    parted = tf.constant(mine(world.rank, sum(sizes)))
    expected: dict[str, Any] = {
        "average": everything.mean(0),
        "sum": everything.sum(0),
        "max": everything.max(0),
        "product": everything.prod(0),
        "group": everything.sum(0) * 2,
        "bfloat16": total(world),
        "gather": np.concatenate([mine(rank, rank + 1) for rank in ranks]),
        "columns": np.concatenate([mine(rank, rank + 1).T for rank in ranks], 1),
        "broadcast": mine(size - 1),
        "alltoall": np.concatenate([np.array_split(mine(rank, 2 * size), size)[world.rank] for rank in ranks]),
        "splits": np.concatenate([np.split(mine(r, sum(sizes)), np.cumsum(sizes)[:-1])[world.rank] for r in ranks]),
        "counts": [world.rank + 1] * size,
        "reducescatter": np.array_split(sum(mine(rank, size + 1) for rank in ranks), size)[world.rank],
    }

    def results() -> dict[str, Any]:
        splits = hvdtrain.alltoall(parted, sizes)
        return {
            "average": hvdtrain.allreduce(variable),
            "sum": hvdtrain.allreduce(variable, hvd.Sum),
            "max": hvdtrain.allreduce(variable, "max", name="largest"),
            "product": hvdtrain.allreduce(variable, "product"),
            "group": hvdtrain.grouped_allreduce([tf.ones(2), variable * 2.0], "sum")[1],
            "bfloat16": hvdtrain.allreduce(tf.cast(tf.fill([4, 3], world.rank + 1), tf.bfloat16), "sum"),
            "gather": hvdtrain.allgather(ragged),
            "columns": hvdtrain.all_gather(tf.transpose(ragged), axis=1),
            "broadcast": hvdtrain.broadcast(variable, size - 1),
            "alltoall": hvdtrain.alltoall(mine(world.rank, 2 * size)),
            "splits": splits[0],
            "counts": splits[1],
            "reducescatter": hvdtrain.reducescatter(mine(world.rank, size + 1), "sum"),
        }

    for found in both_ways(results):
        for name, value in found.items():
            np.testing.assert_allclose(tf.cast(value, tf.float64), expected[name], err_msg=name, atol=1e-12)
    assert (hvdtrain.local_size(), hvdtrain.cross_rank()) == (size, 0)
    for call, value, said in (
        (hvdtrain.allreduce, True, "does not reduce bool: instead of x take tf.cast(x, tf.int32)"),
        (hvdtrain.reducescatter, tf.ones([size], tf.uint16), "does not reduce uint16"),
        (hvdtrain.all_gather, ["text"], "does not exchange string: instead of x take hvdtrain.gather_object"),
        (hvdtrain.broadcast, 1j, "does not exchange complex128: instead of x take its tf.math.real and tf.math.imag"),
        (hvdtrain.alltoall, ["text"] * size, "does not exchange string"),
    ):
        with refused(said, ConfigError):
            call(value)


@worlds("mpirun-2", "gloo-2")
def check_sparse_tensors_and_process_sets_of_scripts(world: World) -> None:
    rows = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 2 + world.rank]), tf.constant([6, 2]))
    table = np.zeros((6, 2))
    table[1] = world.size
    table[2 : 2 + world.size] = 1
    for found in both_ways(lambda: hvdtrain.allreduce(rows, "sum")):
        assert len(found.indices) == 1 + world.size
        np.testing.assert_array_equal(tf.convert_to_tensor(found), table)
    alone = [hvd.add_process_set([rank]) for rank in range(world.size)]
    own = alone[world.rank]
    for found in both_ways(lambda: hvdtrain.allreduce(world.rank + 1.0, "sum", process_set=own)):
        assert float(found) == world.rank + 1.0
    assert int(hvdtrain.broadcast(world.rank, world.rank, process_set=own)) == world.rank
    variable = tf.Variable(float(world.rank))
    with hvdtrain.DistributedGradientTape(process_set=own) as tape:
        loss = variable * variable
    assert float(tape.gradient(loss, variable)) == 2 * world.rank
    world.gather(b"")
    for each in alone:
        hvd.remove_process_set(each)


def check_a_function_exchanges_that_has_made_variables_before(world: World) -> None:
    """In a set that has not exchanged before, and inside a strategy's scope: TensorFlow allows no other variable."""
    for scope in (contextlib.nullcontext, tf.distribute.MirroredStrategy(["/cpu:0"]).scope):
        alone = [hvd.add_process_set([rank]) for rank in range(world.size)]
        own, layer = alone[world.rank], keras.layers.Dense(1, kernel_initializer="ones")

        @tf.function(autograph=False)
        def step(x: tf.Tensor, exchanges: bool, layer: Any = layer, own: Any = own) -> tf.Tensor:
            outputs = layer(x)
            return hvdtrain.allreduce(outputs, "sum", process_set=own) if exchanges else outputs

        with scope():
            x = tf.fill([1, 2], world.rank + 1.0)
            assert [float(step(x, exchanges)[0, 0]) for exchanges in (False, True)] == 2 * [2.0 * world.rank + 2.0]
        world.gather(b"")
        for each in alone:
            hvd.remove_process_set(each)


def contrastive(features: Any) -> Any:
    """A loss of each sample's features with those of all others."""
    return tf.reduce_mean(tf.reduce_logsumexp(features @ tf.transpose(features), 1))


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-4", extended=True)
def check_a_loss_over_gathered_features_has_the_gradient_of_one_process(world: World) -> None:
    weights = tf.Variable(mine(99, 3), name="weights")
    batches = [tf.constant(mine(rank, rank + 2)) for rank in range(world.size)]
    with tf.GradientTape() as plain:
        loss = contrastive(tf.concat(batches, 0) @ weights)
    expected = plain.gradient(loss, weights)

    def gradient(gather: Any) -> tf.Tensor:
        with hvdtrain.DistributedGradientTape() as tape:
            features = gather(batches[world.rank] @ weights)
            loss = contrastive(features)
        return tape.gradient(loss, weights)

    for found in both_ways(lambda: gradient(hvdtrain.all_gather)):
        assert relative_error([found.numpy()], [expected.numpy()]) <= 1e-12
    if world.size > 1:  # Horovod's gradient of a gather is an average
        assert relative_error([gradient(hvd.allgather).numpy()], [expected.numpy()]) > 1e-2


@worlds("mpirun-2", "gloo-2")
def check_jacobians_and_repeated_gradients(world: World) -> None:
    """Two gradients of the same variables are under way at once in a function, and have names of their own."""
    variable = tf.Variable([1.0, 2.0], name="v")

    def results() -> Any:
        with hvdtrain.DistributedGradientTape(persistent=True) as tape:
            first = variable * variable * (world.rank + 1.0)
            second = tf.reduce_sum(variable) * 2.0
        return (
            tape.jacobian(first, variable),
            tape.gradient(first, variable),
            tape.gradient(second, [variable], unconnected_gradients=tf.UnconnectedGradients.ZERO)[0],
        )

    average = total(world) / world.size
    for jacobian, of_first, of_second in both_ways(results):
        np.testing.assert_allclose(jacobian, np.diag([2.0, 4.0]) * average)
        np.testing.assert_allclose(of_first, np.array([2.0, 4.0]) * average)
        np.testing.assert_allclose(of_second, [2.0, 2.0])


class Learner:
    """A function that is compiled by itself, whose data one rank has later than those of what is called after it."""

    def __init__(self, is_late: bool, reduce: Any) -> None:
        self._others = threading.Event()
        """Set when data of another learner have come."""
        self._is_late = is_late
        self._reduce = reduce
        self.learn = tf.function(lambda x: self.reduced(x))

    def reduced(self, x: tf.Tensor) -> tf.Tensor:
        value = tf.numpy_function(self._come, [x], tf.float32, stateful=False)
        return self._reduce(tf.ensure_shape(value, []))

    def _come(self, value: np.ndarray) -> np.ndarray:
        if self._is_late:  # no longer than that: they come when this one is done
            self._others.wait(0.1)
        else:
            self._others.set()
        return value


def tape_of(tape: Any) -> Any:
    """Return a function that reduces its argument as the gradient of a loss."""
    variable = tf.Variable(0.0)

    def reduce(x: tf.Tensor) -> Any:
        with tf.GradientTape() as recorded:
            loss = variable * x
        return tape(recorded).gradient(loss, variable)

    return reduce


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_functions_that_are_called_within_one_exchange_one_after_another(world: World) -> None:
    """Whether they were traced alone, by all ranks or one; in pairs, twice, in loops and branches, beside others."""
    ranks = np.arange(world.size)
    mine, other = float(world.rank), 100.0 + world.rank
    first, second = ranks.mean(), 100.0 + ranks.mean()

    def learners(reduce: Any) -> list[Learner]:
        found = [Learner(world.rank == late, reduce) for late in (0, 1)]
        found[0]._others = found[1]._others
        return found

    for reduce in (hvdtrain.allreduce, tape_of(hvd.DistributedGradientTape)):
        a, b = learners(reduce)
        a.learn(tf.constant(mine))
        if world.rank == 0:  # the other rank traces it within the functions below
            b.learn.get_concrete_function(tf.constant(mine))
        branch = tf.function(lambda x, a=a: tf.cond(x >= 0.0, lambda: a.reduced(x), lambda: x), autograph=False)

        def looped(p: tf.Tensor, q: tf.Tensor, a: Learner = a) -> Any:
            return tf.unstack(tf.map_fn(lambda x: a.learn(x) + a.reduced(x), tf.stack([p, q])))

        cases: dict[str, Any] = {
            "a pair": lambda p, q, a=a, b=b: (a.learn(p), b.learn(q)),
            "twice": lambda p, q, a=a: (a.learn(p), a.learn(q)),
            "a call last": lambda p, q, a=a, b=b: (a.reduced(p), b.learn(q)),
            "a call first": lambda p, q, a=a, b=b: (a.learn(p), b.reduced(q)),
            "branches": lambda p, q, branch=branch: (branch(p), branch(q)),
            "a loop": looped,
        }
        for name, function in cases.items():
            found = tf.function(function, autograph=False)(tf.constant(mine), tf.constant(other))
            times = 2.0 if name == "a loop" else 1.0
            np.testing.assert_array_equal(found, [times * first, times * second], err_msg=name)
