import re
import threading
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.training.reduction import GradientReducer, ReductionOptions
from tests.unit.threaded_ranks import on_threads


class Meeting:
    """Where the replicas of one process, each on a thread, put their tensors together."""

    def __init__(self, size):
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.brought = [None] * size
        self.log = []

    def put_together(self, index, what, tensors):
        """Return every replica's tensors; all must have come for the same reason."""
        self.brought[index] = (what, [(t.dtype, *t.shape[1:]) for t in tensors], tensors)
        self.barrier.wait()
        brought = list(self.brought)
        self.barrier.wait()
        if index == 0:
            self.log.append(what)
        assert len({str(each[:2]) for each in brought}) == 1, "the replicas' messages do not match"
        return [each[2] for each in brought]


class Replica:
    """An exchange that adds in the tensors' own precision, as Horovod does."""

    def __init__(self, meeting, index):
        self._meeting = meeting
        self.index = index
        self.size = meeting.size

    def _sum(self, what, tensors, prescale, postscale):
        scaled = [t * tf.cast(prescale, t.dtype) for t in tensors]
        parts = self._meeting.put_together(self.index, (*what, prescale, postscale), scaled)
        sums = []
        for column in zip(*parts, strict=True):
            total = column[0]
            for tensor in column[1:]:
                total = total + tensor
            sums.append(total * tf.cast(postscale, total.dtype))
        return sums

    def all_reduce(self, tensor, *, name, op="sum", prescale=1.0, postscale=1.0):
        return self._sum((op, name), [tensor], prescale, postscale)[0]

    def grouped_all_reduce(self, tensors, *, name, prescale=1.0, postscale=1.0):
        assert tensors, "a message without tensors"
        return self._sum(("group", name, len(tensors)), tensors, prescale, postscale)

    def all_gather(self, tensor, *, name):
        return tf.concat([t for (t,) in self._meeting.put_together(self.index, ("gather", name), [tensor])], 0)


def reduce_on(size, gradients, paths, role="gradient", **options):
    """Reduce `gradients(rank)` on every replica; return rank 0's result and what was sent."""
    meeting = Meeting(size)

    def body(rank):
        reducer = GradientReducer(Replica(meeting, rank), ReductionOptions(**options))
        return reducer.reduce(gradients(rank), paths, role=role)

    outcomes = on_threads(size, body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
        for mine, first in zip(outcome, outcomes[0], strict=True):
            if first is None:
                assert mine is None
            else:
                np.testing.assert_array_equal(tf.convert_to_tensor(mine), tf.convert_to_tensor(first))
    return outcomes[0], meeting.log


PATHS = ["a", "b", "c", "d", "e"]


def five(rank):
    """Gradients of two dtypes, one of them missing."""
    return [
        tf.fill([2], rank + 1.0),
        tf.fill([3], 10.0 * (rank + 1)),
        None,
        tf.cast(tf.fill([2, 2], 100.0 * (rank + 1)), tf.float64),
        tf.fill([], 1000.0 * (rank + 1)),
    ]


def expect_five(reduced, factor):
    for value, like in zip(reduced, five(0), strict=True):
        if like is None:
            assert value is None
        else:
            assert (value.dtype, value.shape) == (like.dtype, like.shape)
            np.testing.assert_allclose(value, like * tf.cast(factor, like.dtype), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("groups", [0, 1, 2, 4, 99, (("a", "d"), ("e",)), (("c",), ("nothing",))])
def test_every_gradient_is_reduced_once_whatever_leaves_together(size, op, groups):
    total = size * (size + 1) / 2
    reduced, log = reduce_on(size, five, PATHS, op=op, groups=groups)
    expect_five(reduced, total if op == "sum" else total / size)
    names = [what[1] for what in log]
    assert len(set(names)) == len(names), "two messages share a name"
    assert sum(what[2] if what[0] == "group" else 1 for what in log) == 4


def test_without_groups_each_leaves_under_its_own_path():
    _, log = reduce_on(2, five, PATHS, op="sum", role="first")
    assert [what[:2] for what in log] == [("sum", f"first/{path}") for path in "abde"]


@pytest.mark.parametrize(
    ("groups", "sizes"),
    [
        (1, [3, 1]),  # one message holds one dtype
        (2, [2, 1, 1]),
        (4, [1, 1, 1, 1]),
        (99, [1, 1, 1, 1]),
        ((("a", "b", "e"),), [3]),
        ((("e", "a"), ("d", "b")), [2, 1, 1]),
    ],
)
def test_groups_leave_whole(groups, sizes):
    _, log = reduce_on(2, five, PATHS, groups=groups)
    assert Counter(what[2] for what in log if what[0] == "group") == Counter(sizes)


def test_nothing_to_reduce_sends_nothing():
    for groups in (0, 3):
        assert reduce_on(2, lambda rank: [None, None], ["a", "b"], groups=groups) == ([None, None], [])
        assert reduce_on(2, lambda rank: [], [], groups=groups) == ([], [])


def test_predivide_divides_before_and_after():
    reduced, log = reduce_on(2, five, PATHS, predivide=4.0)
    expect_five(reduced, 1.5)
    assert {what[2:] for what in log} == {(0.25, 2.0)}


# -- 16 bits on the wire --


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("groups", [0, 1])
def test_half_precision_does_not_overflow_in_the_sum(size, op, groups):
    values = [60000.0, -60000.0, 1.0]

    def gradients(rank):
        return [tf.constant(values), tf.constant(values, tf.float64), tf.constant([1.0, 2.0], tf.float16)]

    reduced, _ = reduce_on(size, gradients, ["a", "b", "c"], op=op, compression="fp16", groups=groups)
    factor = size if op == "sum" else 1
    assert [value.dtype for value in reduced] == [tf.float32, tf.float64, tf.float16]
    for value in reduced[:2]:
        np.testing.assert_allclose(value, np.array(values) * factor, rtol=2**-10)
    np.testing.assert_allclose(reduced[2], np.array([1.0, 2.0]) * factor)


def test_half_precision_is_what_travels():
    seen = []

    class Wire(Replica):
        def _sum(self, what, tensors, prescale, postscale):
            seen.extend(tensor.dtype for tensor in tensors)
            return super()._sum(what, tensors, prescale, postscale)

    gradients = [tf.ones(2), tf.ones(2, tf.float64), tf.ones(2, tf.bfloat16)]
    for compression in ("none", "fp16"):
        reducer = GradientReducer(Wire(Meeting(1), 0), ReductionOptions(compression=compression))
        reducer.reduce(gradients, ["a", "b", "c"])
    assert seen == [tf.float32, tf.float64, tf.bfloat16, tf.float16, tf.float16, tf.bfloat16]


# -- rows --


def rows(rank):
    """Row 1 twice on every replica, rows of its own, and none at all on the last of three."""
    indices = [[1, 1, 2], [4, 1], []][rank]
    values = tf.reshape(tf.range(2.0 * len(indices)), [-1, 2]) + 1.0
    return [tf.IndexedSlices(values, tf.constant(indices, tf.int32), tf.constant([6, 2]))]


def dense_rows(size):
    return sum(np.array(tf.convert_to_tensor(rows(rank)[0])) for rank in range(size))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("groups", [0, 2, (("table",),)])
def test_rows_are_added_up_over_replicas_and_within_one(size, op, dense, groups):
    reduced, _ = reduce_on(size, rows, ["table"], op=op, sparse_as_dense=dense, groups=groups)
    assert isinstance(reduced[0], tf.IndexedSlices) != dense
    if not dense:
        indices = reduced[0].indices.numpy().tolist()
        # Keras' optimizers would apply a row that stands twice as two updates.
        assert len(indices) == len(set(indices))
    expected = dense_rows(size) / (size if op == "average" else 1)
    np.testing.assert_allclose(tf.convert_to_tensor(reduced[0]), expected, rtol=1e-6)


def test_rows_and_dense_gradients_keep_their_places():
    def gradients(rank):
        return [None, *rows(rank), tf.fill([2], rank + 1.0)]

    reduced, log = reduce_on(2, gradients, ["x", "table", "y"], op="sum")
    assert reduced[0] is None
    np.testing.assert_allclose(tf.convert_to_tensor(reduced[1]), dense_rows(2))
    np.testing.assert_allclose(reduced[2], [3, 3])
    assert {what[1] for what in log} == {"gradient/table/values", "gradient/table/indices", "gradient/y"}


# -- Adasum --


def test_adasum_leaves_the_arithmetic_to_the_exchange():
    _, log = reduce_on(2, five, PATHS, op="adasum")
    assert log == [("adasum", f"gradient/{path}", 1.0, 1.0) for path in "abde"]


def test_adasum_of_rows_is_refused():
    with pytest.raises(ConfigError, match="sparse_as_dense=True"):
        reduce_on(1, rows, ["table"], op="adasum")
    reduce_on(1, rows, ["table"], op="adasum", sparse_as_dense=True)


# -- options --


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"op": "mean"}, "op must be one of average, sum, adasum. Received: 'mean'."),
        ({"compression": "int8"}, "compression must be none or fp16. Received: 'int8'."),
        ({"groups": -1}, "groups must not be negative. Received: -1."),
        ({"predivide": 0.0}, "gradient_predivide_factor must be positive. Received: 0.0."),
        ({"predivide": -2.0}, "gradient_predivide_factor must be positive. Received: -2.0."),
        ({"predivide": 2.0, "op": "sum"}, "gradient_predivide_factor needs op average. Received: op 'sum'."),
        ({"predivide": 2.0, "op": "adasum"}, "gradient_predivide_factor needs op average."),
        ({"groups": 2, "op": "adasum"}, "Adasum reduces each gradient by itself: groups must be 0."),
        ({"groups": (("a",),), "op": "adasum"}, "Adasum reduces each gradient by itself"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        ReductionOptions(**options)


# -- names --


@pytest.fixture(scope="module")
def collective_name():
    pytest.importorskip("horovod.tensorflow", reason="Horovod is not installed")
    from hvdtrain.runtime.collectives import collective_name

    return collective_name


AWKWARD = [
    "dense/kernel",
    "dense.kernel",
    "dense kernel",
    "dense_kernel",
    "dense-kernel",
    "dense:kernel",
    "dense/kernel#2",
    "dense/kernel.2",
    "Dense/kernel",
    "größe/kernel",
    "grösse/kernel",
    "层/kernel",
    "\u5c42/kernel\n",
    "",
    "_",
    "a" * 300,
]


def test_a_collectives_name_is_a_function_of_its_parts(collective_name):
    assert collective_name("dp", "gradient/dense") == collective_name("dp", "gradient/dense")
    assert collective_name("dp", "plain_name-1.x") == "dp.plain_name-1.x"


def test_different_collectives_have_different_names(collective_name):
    names = [collective_name("dp", f"{role}/{path}") for role in ("gradient", "broadcast") for path in AWKWARD]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", AWKWARD)
def test_tensorflow_takes_every_name_as_it_is(collective_name, path):
    name = collective_name("dp", path)
    with tf.Graph().as_default():
        assert tf.raw_ops.NoOp(name=name).name == name
    assert "/" not in name
