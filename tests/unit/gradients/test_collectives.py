"""The collectives of scripts: results and gradients among threads that stand for ranks, and in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients import collectives as c
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on

ROWS = (2, 0, 5)
"""Rows of each rank's tensor, where they may differ."""


def alike(rank, size):
    return np.random.default_rng(rank).standard_normal((7, 2))


def ragged(rank, size):
    return alike(rank, size)[: ROWS[rank]]


def splits(rank, size):
    """Rank r sends r + i rows to rank i."""
    return [rank + i for i in range(size)]


def parted(rank, size):
    return np.random.default_rng(rank).standard_normal((sum(splits(rank, size)), 2))


def divisible(rank, size):
    return alike(rank, size)[: 7 // size * size]


def received(xs, cuts, rank):
    return np.concatenate([np.split(x, np.cumsum(cut)[:-1])[rank] for x, cut in zip(xs, cuts, strict=True)])


FACTORS = {"prescale": 0.5, "postscale": 6.0}
CASES = {
    "sum": (alike, lambda x, g: c.all_reduce([x], g, name="n")[0], lambda xs, rank: sum(xs)),
    "average": (alike, lambda x, g: c.all_reduce([x], g, name="n", op="average")[0], lambda xs, rank: np.mean(xs, 0)),
    "sum with factors": (
        alike,
        lambda x, g: c.all_reduce([x], g, name="n", **FACTORS)[0],
        lambda xs, rank: 3 * sum(xs),
    ),
    "average of a group": (
        alike,
        lambda x, g: c.all_reduce([x, 2 * x], g, name="n", op="average")[1],
        lambda xs, rank: 2 * np.mean(xs, 0),
    ),
    "gather": (ragged, lambda x, g: c.gather([x], g, name="n")[0], lambda xs, rank: np.concatenate(xs)),
    "gather of a group": (
        ragged,
        lambda x, g: c.gather([x, 2 * x], g, name="n")[1],
        lambda xs, _: 2 * np.concatenate(xs),
    ),
    "broadcast": (alike, lambda x, g: c.send(x, g, root=g.size - 1, name="n"), lambda xs, rank: xs[-1]),
    "rows": (
        parted,
        lambda x, g: c.exchange_rows(x, tf.constant(splits(g.index, g.size)), g, name="n")[0],
        lambda xs, rank: received(xs, [splits(i, len(xs)) for i in range(len(xs))], rank),
    ),
    "equal rows": (
        divisible,
        lambda x, g: c.exchange_rows(x, tf.constant([], tf.int32), g, name="n")[0],
        lambda xs, rank: received(xs, [[7 // len(xs)] * len(xs)] * len(xs), rank),
    ),
    "reduce-scatter": (
        alike,
        lambda x, g: c.reduce_scatter([x], g, name="n", **FACTORS)[0],
        lambda xs, rank: np.array_split(3 * sum(xs), len(xs))[rank],
    ),
}


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_adjoint(name, size):
    """For a linear map f, the sums over all ranks of <dy, f(x)> and of <gradient, x> are equal."""
    inputs, call, formula = CASES[name]
    xs = [inputs(rank, size) for rank in range(size)]
    meeting = Meeting(size)

    def body(rank):
        x = tf.constant(xs[rank])
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x, Replica(meeting, rank))
        dy = np.random.default_rng(9 + rank).standard_normal(y.shape)
        return y.numpy(), dy, tape.gradient(y, x, tf.constant(dy, "float32" if rank else "float64")).numpy()

    outcomes = outcomes_on(size, body)
    for rank, (y, _, gradient) in enumerate(outcomes):
        np.testing.assert_allclose(y, formula(xs, rank), atol=1e-12)
        assert gradient.dtype == np.float64
    upstream = sum((dy.astype("float32" if rank else "float64") * y).sum() for rank, (y, dy, _) in enumerate(outcomes))
    back = sum((gradient * x).sum() for (_, _, gradient), x in zip(outcomes, xs, strict=True))
    assert back == pytest.approx(upstream, rel=1e-10)


def test_rows_of_sparse_tensors_are_summed_and_have_gradients():
    meeting = Meeting(2)

    def body(rank):
        values = tf.constant([[1.0], [2.0], [4.0]]) * (rank + 1.0)
        with tf.GradientTape() as tape:
            tape.watch(values)
            rows = tf.IndexedSlices(values, tf.constant([1, 1, 2 + rank]), tf.constant([5, 1]))
            total = c.reduce_rows(rows, Replica(meeting, rank), name="n", divisor=2)
            assert len(set(total.indices.numpy())) == len(total.indices)
            dense = tf.convert_to_tensor(total)
        return dense.numpy().ravel(), tape.gradient(dense, values, tf.range(5.0)[:, tf.newaxis]).numpy().ravel()

    for rank, (dense, gradient) in enumerate(outcomes_on(2, body)):
        np.testing.assert_allclose(dense, [0, 4.5, 2, 4, 0])
        np.testing.assert_allclose(gradient, [1, 1, 2 + rank])  # of both ranks' losses, halved


@pytest.mark.parametrize("op", ["min", "max", "product", "adasum"])
def test_reductions_that_are_not_linear_refuse_a_gradient(op, session):
    x = tf.Variable([1.0])
    with tf.GradientTape() as tape:
        y = hvdtrain.allreduce(x, op)
    assert float(y[0]) == 1.0
    with pytest.raises(ConfigError, match=f"op='{op}' has no gradient"):
        tape.gradient(y, x)


VARIABLE = keras.Variable(np.arange(6.0).reshape(3, 2), dtype="float64")


def identities():
    rows = tf.IndexedSlices(tf.ones([3, 2]), tf.constant([0, 2, 2]), tf.constant([4, 2]))
    variable = VARIABLE
    return {
        "allreduce": (hvdtrain.allreduce(variable), variable),
        "allreduce of rows": (hvdtrain.allreduce(rows, "sum"), rows),
        "grouped": (hvdtrain.grouped_allreduce([variable, rows, 3])[1], rows),
        "grouped integers": (hvdtrain.grouped_allreduce([variable, rows, 3])[2], 3),
        "factors": (hvdtrain.allreduce(variable, 1, prescale_factor=0.5, postscale_factor=2.0), variable),
        "allgather": (hvdtrain.allgather(variable), variable),
        "all_gather": (hvdtrain.all_gather(variable, axis=-1), variable),
        "broadcast": (hvdtrain.broadcast(variable), variable),
        "alltoall": (hvdtrain.alltoall(variable), variable),
        "alltoall with splits": (hvdtrain.alltoall(variable, [3])[0], variable),
        "reducescatter": (hvdtrain.reducescatter(variable, "sum"), variable),
        "strings": (hvdtrain.broadcast(tf.constant(["a"])), tf.constant(["a"])),
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_one_process_gets_back_what_it_gave(compiled, session):
    for name, (found, given) in (tf.function(identities)() if compiled else identities()).items():
        found, given = (tf.convert_to_tensor(each) for each in (found, given))
        assert found.dtype == given.dtype, name
        np.testing.assert_array_equal(found, given, err_msg=name)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: hvdtrain.allreduce(1.0, "mean"), "op must be one of average, sum, .* Received: 'mean'"),
        (lambda: hvdtrain.allreduce(1.0, 7), "Received: 7"),
        (
            lambda: hvdtrain.allreduce(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([0]), None), "max"),
            "tf.IndexedSlices have op='average' and 'sum', without factors. Received: op='max'",
        ),
        (lambda: hvdtrain.all_gather(tf.ones([2, 3]), axis=2), r"Received: axis=2 and the shape \(2, 3\)"),
        (lambda: hvdtrain.all_gather(1.0), "axis must be a dim of the tensor"),
        (lambda: hvdtrain.broadcast(1.0, 1), "root_rank must be one of 0. Received: 1"),
        (lambda: hvdtrain.reducescatter([1.0], "max"), "reducescatter has op='average' and 'sum'"),
    ],
)
def test_what_collectives_refuse(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


def test_reductions_have_horovods_numbers():
    hvd = pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")
    constants = (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product)
    assert [c.op_name(each) for each in constants] == list(c.OPS)
