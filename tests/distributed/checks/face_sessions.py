"""Horovod's API of TensorFlow 1 through the face: graphs, sessions, optimizers of `tf.compat.v1.train`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as plain
import numpy as np
import tensorflow as tf
from world import World, flat_bytes, refused, relative_error
from worlds import worlds

import hvdtrain.horovod as hvd
from hvdtrain.horovod.gradient_aggregation_eager import LocalGradientAggregationHelperEager

v1 = tf.compat.v1
GLOBAL = hvd.global_process_set
STEPS, BATCH, TOLERANCE = 20, 8, 1e-9
RATE = 0.0625
"""Exact in float32, as TensorFlow 1 keeps it."""


def batches() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 5, (STEPS, BATCH, 3)).astype("int32")
    return list(zip(ids, rng.standard_normal((STEPS, BATCH, 1)), strict=True))


@dataclass(frozen=True)
class Model:
    """An embedding, a hidden layer, and a variable without a gradient, in the default graph."""

    ids: Any
    targets: Any
    loss: Any

    @classmethod
    def build(cls, scope: str = "model") -> "Model":
        ids, targets = v1.placeholder(tf.int32, [None, 3]), v1.placeholder(tf.float64, [None, 1])
        with v1.variable_scope(scope):
            table = variable("table", [5, 4])
            hidden = tf.tanh(tf.reshape(tf.gather(table, ids), [-1, 12]) @ variable("hidden", [12, 6]))
            variable("unused", [2])
            outputs = hidden @ variable("out", [6, 1]) + variable("bias", [1])
        return cls(ids, targets, tf.reduce_mean(tf.square(outputs - targets)))

    def feed(self, batch: tuple[np.ndarray, np.ndarray], part: slice) -> dict[Any, Any]:
        return {self.ids: batch[0][part], self.targets: batch[1][part]}


def variable(name: str, shape: list[int]) -> Any:
    """The same variable for any rank; what `spoil` changes, a broadcast has to mend."""
    values = np.random.default_rng(len(name)).standard_normal(shape)
    return v1.get_variable(name, shape, tf.float64, v1.constant_initializer(values))


def spoil(session: Any, world: World) -> None:
    for each in v1.trainable_variables():
        each.load(session.run(each) + world.rank, session)


def weights_of(session: Any) -> list[np.ndarray]:
    return [np.asarray(value) for value in session.run(v1.trainable_variables())]


def adam() -> Any:
    return v1.train.AdamOptimizer(RATE)


def trained(world: World, wrap: Callable[[Any], Any], alone: bool = False, optimizer: Any = adam) -> list[np.ndarray]:
    """Weights after all batches, in a session of their own; `alone` on whole batches."""
    part = slice(None) if alone else slice(world.rank, None, world.size)
    with tf.Graph().as_default():
        model = Model.build()
        step = v1.train.get_or_create_global_step()
        update = wrap(optimizer()).minimize(model.loss, global_step=step)
        send = None if alone else hvd.broadcast_global_variables(0)
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            if not alone:
                spoil(session, world)
                session.run(send)
            start = weights_of(session)
            for batch in batches():
                session.run(update, model.feed(batch, part))
            assert session.run(step) == STEPS
            weights = weights_of(session)
    assert max(float(np.abs(a - b).max()) for a, b in zip(weights, start, strict=True)) > 1e-2
    return weights


def agree(world: World, weights: list[np.ndarray], reference: list[np.ndarray]) -> None:
    error = relative_error(weights, reference)
    assert error <= TOLERANCE, error
    assert world.same_everywhere(flat_bytes(weights))


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_sessions_train_as_one_process(world: World) -> None:
    expected = trained(world, lambda optimizer: optimizer, alone=True)
    agree(world, trained(world, hvd.DistributedOptimizer), expected)
    doubled = trained(world, lambda optimizer: hvd.DistributedOptimizer(optimizer, op=hvd.Sum), optimizer=momentum)
    assert relative_error(doubled, trained(world, lambda each: each, alone=True, optimizer=momentum)) > 1e-3


def momentum() -> Any:
    return v1.train.MomentumOptimizer(RATE, 0.5)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_sessions_train_as_with_plain_horovod(world: World) -> None:
    for options in (
        {"op": hvd.Sum},
        {"groups": 2, "process_set": GLOBAL, "name": "Mine", "use_locking": True},
        {"gradient_predivide_factor": 2.0, "sparse_as_dense": True},
    ):
        expected = trained(world, lambda each, o=options: plain.DistributedOptimizer(each, **o), optimizer=momentum)
        found = trained(world, lambda each, o=options: hvd.DistributedOptimizer(each, **o), optimizer=momentum)
        agree(world, found, expected)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_gradients_are_aggregated_locally(world: World) -> None:
    """K sums of a mean each, on every rank's own samples; a mean of all of them is what one process steps with."""
    passes = 2
    options = {"backward_passes_per_step": passes, "average_aggregated_gradients": True, "sparse_as_dense": True}
    with tf.Graph().as_default():
        model = Model.build()
        update = momentum().minimize(model.loss)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for first, second in zip(batches()[::2], batches()[1::2], strict=True):
                both = tuple(np.concatenate(each) for each in zip(first, second, strict=True))
                session.run(update, model.feed(both, slice(None)))
            expected = weights_of(session)
    agree(world, trained(world, lambda each: hvd.DistributedOptimizer(each, **options), optimizer=momentum), expected)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_two_optimizers_of_one_graph_do_not_share_their_sums(world: World) -> None:
    """Two models of equal shapes, one learning from targets of another sign."""
    part = slice(world.rank, None, world.size)
    options = {"backward_passes_per_step": 2, "sparse_as_dense": True}
    with tf.Graph().as_default():
        models = [Model.build("first"), Model.build("second")]
        wrapped = [hvd.DistributedOptimizer(momentum(), **options) for _ in models]
        updates = [
            each.minimize(model.loss, var_list=v1.trainable_variables(scope))
            for each, model, scope in zip(wrapped, models, ("first", "second"), strict=True)
        ]
        with v1.Session() as session:
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            for ids, targets in batches():
                feeds = [m.feed((ids, sign * targets), part) for m, sign in zip(models, (1, -1), strict=True)]
                session.run(updates, feeds[0] | feeds[1])
            both = weights_of(session)
    single = trained(world, lambda each: hvd.DistributedOptimizer(each, **options), optimizer=momentum)
    agree(world, both[: len(single)], single)
    assert relative_error(both[len(single) :], single) > 1e-3


@worlds("mpirun-2", "gloo-2", extended=True)
def check_graphs_may_differ_between_ranks(world: World) -> None:
    """Rank 0 looks at gradients of its own; the names of all later ops differ."""

    def wrap(optimizer: Any) -> Any:
        if world.rank == 0:
            loss = tf.add_n([tf.reduce_sum(tf.square(each)) for each in v1.trainable_variables()])
            assert tf.gradients(loss, v1.trainable_variables())
        return hvd.DistributedOptimizer(optimizer)

    agree(world, trained(world, wrap), trained(world, lambda optimizer: optimizer, alone=True))


@worlds("mpirun-2", "gloo-2", extended=True)
def check_constant_gradients_are_exchanged_in_every_step(world: World) -> None:
    class Constant(v1.train.GradientDescentOptimizer):
        def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
            return [(tf.constant([float(world.rank)]), v1.trainable_variables()[0])]

    for passes in (1, 4):
        with tf.Graph().as_default():
            v1.get_variable("x", [1], initializer=v1.zeros_initializer())
            optimizer = hvd.DistributedOptimizer(
                Constant(1.0), backward_passes_per_step=passes, average_aggregated_gradients=True
            )
            update = optimizer.apply_gradients(optimizer.compute_gradients())
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for step in range(1, 11):
                    session.run(update)
                    expected = -(step // passes) * (world.size - 1) / 2
                    np.testing.assert_allclose(session.run(v1.trainable_variables()[0]), [expected])


@worlds("mpirun-2", "gloo-2", extended=True)
def check_local_variables_keep_their_own_gradients(world: World) -> None:
    for passes in (1, 2):
        with tf.Graph().as_default():
            shared, own = (v1.get_variable(n, [], initializer=v1.zeros_initializer()) for n in ("shared", "own"))
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=passes
            )
            optimizer.register_local_var(own)
            update = optimizer.minimize((shared + own) * (world.rank + 1.0))
            with v1.Session() as session:
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for _ in range(2):
                    session.run(update)
                assert np.isclose(session.run(shared), -2 * (world.size + 1) / 2)
                assert np.isclose(session.run(own), -2 * (world.rank + 1) / world.size)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_optimizers_of_tensorflow_1_without_sessions(world: World) -> None:
    samples, targets = np.random.default_rng(4).standard_normal((2, 8, 2))

    def run(wrap: Callable[[Any], Any], part: slice, compiled: bool) -> list[np.ndarray]:
        w, b = tf.Variable(tf.ones([2, 2], tf.float64)), tf.Variable(tf.zeros([2], tf.float64))
        optimizer = wrap(adam())

        def step() -> None:
            optimizer.minimize(lambda: tf.reduce_mean((samples[part] @ w + b - targets[part]) ** 2), var_list=[w, b])

        step = tf.function(step) if compiled else step
        for _ in range(5):
            step()
        return [w.numpy(), b.numpy()]

    expected = run(lambda optimizer: optimizer, slice(None), False)
    for compiled in (False, True):
        agree(world, run(hvd.DistributedOptimizer, slice(world.rank, None, world.size), compiled), expected)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_monitored_sessions_begin_alike_and_resume(world: World) -> None:
    """Rank 0 alone has the checkpoint; the hook sends what it has read, the step too."""
    folder = str(world.folder / "monitored") if world.rank == 0 else None
    for first, last in ((0, 3), (3, 5)):
        with tf.Graph().as_default():
            model = Model.build()
            step = v1.train.get_or_create_global_step()
            update = hvd.DistributedOptimizer(adam()).minimize(model.loss, global_step=step)
            v1.get_variable("of_this_rank", initializer=float(world.rank))
            hooks = [hvd.BroadcastGlobalVariablesHook(0), v1.train.StopAtStepHook(last_step=last)]
            with v1.train.MonitoredTrainingSession(checkpoint_dir=folder, hooks=hooks) as session:
                assert session.run(step) == first
                for place in range(first, last):
                    values = [np.asarray(value) for value in session.run(v1.global_variables())]
                    assert world.same_everywhere(flat_bytes(values))
                    session.run(update, model.feed(batches()[place], slice(world.rank, None, world.size)))
                assert session.should_stop()


@worlds("mpirun-2", "gloo-2", extended=True)
def check_ranks_must_broadcast_the_same_variables(world: World) -> None:
    with tf.Graph().as_default():
        v1.get_variable("everywhere", [2])
        if world.rank == 1:
            v1.get_variable("here", [2])
        send = hvd.broadcast_global_variables(0)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            with refused("need the same variables on all ranks", tf.errors.InvalidArgumentError):
                session.run(send)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_variables_are_broadcast_in_sessions(world: World) -> None:
    for inplace in (False, True):
        with tf.Graph().as_default():
            each = v1.get_variable("each", initializer=[float(world.rank)] * 3)
            count = v1.get_variable("count", initializer=world.rank)
            send = hvd.broadcast_variables([each, count], root_rank=world.size - 1, inplace=inplace)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                session.run(send)
                assert session.run([count, each[2]]) == [world.size - 1, world.size - 1]


@worlds("mpirun-2", extended=True)
def check_adasum_combines_the_steps_of_optimizers_of_tensorflow_1(world: World) -> None:
    """For two ranks; Horovod has Adasum on MPI only."""

    def combined(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        both = (a * b).sum()
        return (1 - both / (2 * (a * a).sum())) * a + (1 - both / (2 * (b * b).sum())) * b

    pulls = np.array([[1.0, 2.0, -1.0], [0.5, -3.0, 2.0]])
    for passes in (1, 2):
        expected = np.ones(3)
        with tf.Graph().as_default():
            w = v1.get_variable("w", [3], tf.float64, v1.ones_initializer())
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(0.25), op=hvd.Adasum, backward_passes_per_step=passes
            )
            update = optimizer.minimize(tf.reduce_sum((w - pulls[world.rank]) ** 2) / 2)
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                for _ in range(3):
                    for _ in range(passes):
                        session.run(update)
                    changes = [(1 - 0.75**passes) * (pull - expected) for pull in pulls]
                    expected = expected + combined(*changes)
                    np.testing.assert_allclose(session.run(w), expected, rtol=1e-12)
                assert world.same_everywhere(session.run(w).tobytes())


@worlds("mpirun-2", "gloo-2", extended=True)
def check_horovods_own_functions_run_in_sessions(world: World) -> None:
    mine = np.arange(world.size) * (world.rank + 1.0)
    with tf.Graph().as_default(), v1.Session() as session:
        own = tf.constant(mine)
        results = [hvd.mpi_ops._allreduce(own), *hvd.mpi_ops._grouped_allreduce([own, own + 1])]
        shard, size, found = session.run([hvd.mpi_ops._grouped_reducescatter([own])[0], hvd.size_op(), results])
    summed = np.arange(world.size) * world.size * (world.size + 1) / 2
    np.testing.assert_allclose(found, [summed, summed, summed + world.size])
    np.testing.assert_allclose(shard, summed[world.rank : world.rank + 1])
    assert size == world.size


@worlds("mpirun-2", "gloo-2", extended=True)
def check_aggregation_by_hand_eagerly(world: World) -> None:
    """On Keras variables and a Keras optimizer, of which Horovod's own helper knows nothing."""
    x, y = tf.keras.Variable(tf.zeros(2)), tf.keras.Variable(tf.zeros(2))
    optimizer = tf.keras.optimizers.SGD(1.0)
    optimizer.build([y])
    reduce = hvd._make_allreduce_grads_fn("by_hand", "", "", hvd.Compression.none, False, hvd.Sum, 1.0, None, GLOBAL)
    helper = LocalGradientAggregationHelperEager(2, reduce, False, False)
    helper.register_local_var(x)
    for step in range(1, 5):
        reduced = helper.compute_gradients([None, tf.constant([float(step), world.rank])], [x, y])
        assert reduced[0] is None
        helper.apply_gradients(lambda r=reduced: optimizer.apply([r[1]], [y]), optimizer, [(reduced[1], y)])
    np.testing.assert_allclose(y.numpy(), [-10.0 * world.size, -2.0 * world.size * (world.size - 1)])
    assert int(optimizer.iterations) == 4
