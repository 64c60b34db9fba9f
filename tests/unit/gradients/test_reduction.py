import re
from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.reduction import GradientReducer, reduction_options
from hvdtrain.gradients.sparse import JoinedRows
from hvdtrain.runtime.packing import pack, unpack
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on, reduce_on

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
    assert sum(gradients_in(what) for what in log) == 4


def gradients_in(sent):
    """Return how many gradients one entry of a log has."""
    kind, name, *more = sent
    return more[0] if kind == "group" else 1 + sum(int(number) for number in re.findall(r" and (\d+) more", name))


def test_small_gradients_of_one_dtype_share_a_tensor():
    reduced, log = reduce_on(2, five, PATHS, op="sum", role="first")
    expect_five(reduced, 3)
    # The backward pass comes to the last layer first, and a name tells of which they are.
    assert [without_checksum(what[1]) for what in log] == ["first/e and 2 more", "first/d"]


def without_checksum(name):
    return re.sub(r"( more)/[0-9a-f]{8}\b", r"\1", name)


def test_packs_of_other_variables_have_another_name():
    # Else what two replicas have of two variables would be added where each lacks the other's.
    def sent(*places):
        gradients = [gradient if i in places else None for i, gradient in enumerate([tf.ones([2])] * 5)]
        return reduce_on(2, lambda rank: gradients, PATHS)[1][0][1]

    assert without_checksum(sent(0, 1, 4)) == without_checksum(sent(0, 2, 4)) == "gradient/e and 2 more"
    assert sent(0, 1, 4) != sent(0, 2, 4)


def test_gradients_may_be_arrays():
    reduced, _ = reduce_on(2, lambda rank: [np.ones(3, np.float32), np.ones([])], ["a", "b"])
    assert [(each.dtype, each.shape) for each in reduced] == [(tf.float32, (3,)), (tf.float64, ())]


def test_sums_by_host_pack_more():
    class ByHost(Replica):
        def __init__(self, *place):
            super().__init__(*place)
            self.by_host = "not asked here"

    meeting = Meeting(2)
    large = [tf.ones([2**16 + 1]), tf.ones([2**16 + 1]), tf.ones([3])]
    outcomes_on(2, lambda rank: GradientReducer(ByHost(meeting, rank)).reduce(large, ["a", "b", "c"]))
    assert [without_checksum(what[1]) for what in meeting.log] == ["gradient/c and 2 more"]
    meeting.log.clear()
    outcomes_on(2, lambda rank: GradientReducer(Replica(meeting, rank)).reduce(large, ["a", "b", "c"]))
    assert [what[1] for what in meeting.log] == ["gradient/a", "gradient/b", "gradient/c"]


def test_an_elastic_job_packs_the_same_for_one_rank():
    # A compiled function of a world of one goes on in a larger one, whose new ranks have others.
    meeting = Meeting(1)
    alone = Replica(meeting, 0)
    alone.sends = True
    GradientReducer(alone).reduce(five(0), PATHS)
    assert [what[1] for what in meeting.log] == [what[1] for what in reduce_on(2, five, PATHS)[1]]


@pytest.mark.parametrize(
    ("small", "packed", "names"),
    [
        (11, 24, ["e and 1 more", "b", "d"]),  # b is too large to be packed
        (12, 24, ["e and 2 more", "d"]),
        (12, 16, ["e and 1 more", "a", "d"]),
        (7, 24, ["a", "b", "d", "e"]),
    ],
)
def test_packs_have_limits(monkeypatch, small, packed, names):
    monkeypatch.setattr("hvdtrain.gradients.reduction.SMALL_BYTES", small)
    monkeypatch.setattr("hvdtrain.gradients.reduction.PACKED_BYTES", packed)
    reduced, log = reduce_on(2, five, PATHS, op="sum")
    expect_five(reduced, 3)
    assert [without_checksum(what[1]).removeprefix("gradient/") for what in log] == names


def test_gradients_whose_size_only_a_run_tells_leave_alone():
    reduced = tf.function(lambda *given: reduce_alone(given), autograph=False)
    unknown = [tf.TensorSpec([None]), tf.TensorSpec([2]), tf.TensorSpec([])]
    results = reduced.get_concrete_function(*unknown)(tf.ones([4]), tf.ones([2]), tf.ones([]))
    assert [tuple(result.shape) for result in results] == [(4,), (2,), ()]


def reduce_alone(gradients):
    """Reduce gradients whose sums are known: of two replicas with the same ones."""

    class Doubled:
        size, index, sends, by_host = 2, 0, True, None

        def __init__(self):
            self.names = []

        def all_reduce(self, tensor, *, name, op="sum", prescale=1.0, postscale=1.0):
            self.names.append(name)
            return 2.0 * tensor

    exchange = Doubled()
    results = GradientReducer(exchange, reduction_options("sum")).reduce(list(gradients), ["a", "b", "c"])
    assert [without_checksum(name) for name in exchange.names] == ["gradient/c and 1 more", "gradient/a"]
    return results


def test_adasum_combines_each_gradient_by_itself():
    _, log = reduce_on(2, five, PATHS, op="adasum")
    assert [what[:2] for what in log] == [("adasum", f"gradient/{path}") for path in "abde"]


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


@pytest.mark.parametrize("compiled", [False, True])
def test_packed_tensors_are_unpacked(compiled):
    def there_and_back(*tensors):
        return unpack(tf.concat([pack(tensors), [7.0]], 0), tensors)

    tensors = [tf.constant([[1.0, 2.0], [3.0, 4.0]]), tf.constant(5.0), tf.zeros([0, 3]), tf.constant([6.0])]
    if compiled:
        there_and_back = tf.function(there_and_back)
    for before, after in zip(tensors, there_and_back(*tensors), strict=True):
        np.testing.assert_array_equal(before, after, strict=True)


def test_nothing_to_reduce_sends_nothing():
    for groups in (0, 3):
        assert reduce_on(2, lambda rank: [None, None], ["a", "b"], groups=groups) == ([None, None], [])
        assert reduce_on(2, lambda rank: [], [], groups=groups) == ([], [])


def test_predivide_divides_before_and_after():
    reduced, log = reduce_on(2, five, PATHS, gradient_predivide_factor=4.0)
    expect_five(reduced, 1.5)
    assert {what[2:] for what in log} == {(0.25, 2.0)}


# -- 16 bits on the wire (the arithmetic is in test_compression.py) --


def many(rank):
    """Dense gradients of every float dtype, and one that is missing."""
    dtypes = [tf.float32, tf.float64, tf.float16, None, tf.bfloat16, tf.float32]
    return [None if dtype is None else tf.cast(tf.fill([i + 1], rank + 1.0), dtype) for i, dtype in enumerate(dtypes)]


LETTERS = list("abcdef")


def scattered(log):
    return [what[1] for what in log if what[0] == "scatter" and what[1].endswith("/scatter")]


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("op", ["sum", "average"])
@pytest.mark.parametrize("groups", [0, 2, 99, (("a", "c"), ("f",)), (("d",),)])
def test_compressed_gradients_come_back_in_their_places(compression, size, op, groups):
    reduced, log = reduce_on(size, many, LETTERS, op=op, groups=groups, compression=compression)
    factor = size * (size + 1) / 2 / (size if op == "average" else 1)
    for value, like in zip(reduced, many(0), strict=True):
        if like is None:
            assert value is None
        else:
            assert (value.dtype, value.shape) == (like.dtype, like.shape)
            # Small integers and halves of them are exact in 16 bits.
            np.testing.assert_allclose(tf.cast(value, tf.float64), factor, rtol=1e-7)
    names = [what[1] for what in log]
    assert len(set(names)) == len(names), "two messages share a name"


@pytest.mark.parametrize(
    ("groups", "names"),
    [
        (0, ["buffer0/compressed/float32", "buffer0/compressed/float64"]),
        (1, ["group0/compressed/float32", "group0/compressed/float64"]),
        (
            (("b", "f"),),
            ["group0/compressed/float64", "group0/compressed/float32", "buffer0/compressed/float32"],
        ),
    ],
)
def test_compressed_gradients_share_a_message_per_dtype_and_group(groups, names):
    _, log = reduce_on(2, many, LETTERS, role="first", groups=groups, compression="bf16")
    assert sorted(scattered(log)) == sorted(f"first/{name}/scatter" for name in names)
    gathered = [what[1] for what in log if what[0] == "scatter" and what[1].endswith("/gather")]
    assert sorted(gathered) == sorted(f"first/{name}/gather" for name in names)


@pytest.mark.parametrize("groups", [0, 1])
def test_what_is_exact_and_what_has_16_bits_travels_as_it_is(groups):
    odd = 1.0 + 2.0**-20

    def gradients(rank):
        return [tf.fill([3], odd), tf.constant(odd), tf.ones(2, tf.float16), tf.constant([7], tf.int32)]

    reduced, log = reduce_on(
        2, gradients, ["w", "totals", "half", "whole"], op="sum", groups=groups, compression="bf16", exact=("totals",)
    )
    np.testing.assert_array_equal(reduced[0], 2.0)
    np.testing.assert_array_equal(reduced[1], np.float32(2 * odd))
    np.testing.assert_array_equal(reduced[2], 2.0)
    np.testing.assert_array_equal(reduced[3], 14)
    assert len(scattered(log)) == 1


def test_one_replica_rounds_nothing():
    odd = 1.0 + 2.0**-20
    reduced, log = reduce_on(1, lambda rank: [tf.constant([odd])], ["w"], compression="bf16")
    np.testing.assert_array_equal(reduced[0], np.float32([odd]))
    assert scattered(log) == []


@pytest.mark.parametrize("dense", [None, False, True])
def test_rows_are_compressed_where_they_are_made_dense(dense):
    large = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([1]), tf.constant([10_000, 2]))
    reduced, log = reduce_on(2, lambda rank: [large], ["t"], op="sum", sparse_as_dense=dense, compression="fp16")
    assert bool(scattered(log)) == (dense is True)
    np.testing.assert_array_equal(tf.convert_to_tensor(reduced[0])[:3], [[0, 0], [2, 2], [0, 0]])


def test_nothing_to_compress_sends_nothing():
    assert reduce_on(2, lambda rank: [], [], compression="fp16") == ([], [])
    assert reduce_on(2, lambda rank: [None, None], ["a", "b"], compression="fp16") == ([None, None], [])


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

    reduced, log = reduce_on(2, gradients, ["x", "table", "y"], op="sum", sparse_as_dense=False)
    assert reduced[0] is None
    np.testing.assert_allclose(tf.convert_to_tensor(reduced[1]), dense_rows(2))
    np.testing.assert_allclose(reduced[2], [3, 3])
    assert {what[1] for what in log} == {"gradient/table/values", "gradient/table/indices", "gradient/y"}


@pytest.mark.parametrize(
    ("rows", "touched", "sent"),
    [
        (100, 1, {"gradient/t"}),  # small: dense, and nobody asks
        (100_000, 10, {"gradient//rows", "gradient/t/values", "gradient/t/indices"}),
        (100_000, 90_000, {"gradient//rows", "gradient/t/dense"}),
    ],
)
def test_tables_travel_as_what_is_smaller(rows, touched, sent):
    def gradients(rank):
        return [tf.IndexedSlices(tf.ones([touched, 2]), tf.range(touched), tf.constant([rows, 2]))]

    # Eagerly: each replica must come to the same answer.
    reduced, log = reduce_on(2, gradients, ["t"], op="sum")
    assert {what[1] for what in log} == sent
    total = tf.convert_to_tensor(reduced[0]).numpy()
    np.testing.assert_array_equal(total[:touched], 2)
    np.testing.assert_array_equal(total[touched:], 0)


def tables(rank, dtype=tf.float32):
    """Two tables of one row shape, a third of another, a vector's, and one of whose rows a replica has none."""

    def of(indices, whole, first):
        shape = [len(indices), *whole[1:]]
        values = tf.reshape(tf.range(float(np.prod(shape))), shape) + first
        return tf.IndexedSlices(tf.cast(values, dtype), tf.constant(indices, tf.int64), tf.constant(whole))

    return [
        of([[3, 1, 3], [1, 0]][rank], [90_000, 2], 1.0),
        of([[5], [4, 5]][rank], [80_000, 3], 2.0),
        of([[1, 1], [2, 3, 4]][rank], [100_000, 2], 3.0),
        of([[7, 8], [8, 9]][rank], [70_000], 4.0),
        of([[], [6]][rank], [60_000, 2], 5.0),
    ]


NAMES = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
@pytest.mark.parametrize("sparse_as_dense", [None, False])
def test_rows_of_one_shape_travel_together(dtype, sparse_as_dense):
    reduced, log = reduce_on(2, lambda rank: tables(rank, dtype), NAMES, op="average", sparse_as_dense=sparse_as_dense)
    counted = {"gradient//rows"} if sparse_as_dense is None else set()
    assert {without_checksum(what[1]) for what in log} == counted | {
        f"gradient/{name}/{part}" for name in ("a and 2 more", "b", "d") for part in ("indices", "values")
    }
    for place, mine in enumerate(reduced):
        like = tables(0, dtype)[place]
        assert (mine.dtype, mine.indices.dtype, mine.dense_shape.numpy().tolist()) == (
            dtype,
            tf.int64,
            like.dense_shape.numpy().tolist(),
        )
        assert len(set(mine.indices.numpy())) == len(mine.indices)
        expected = sum(np.array(tf.convert_to_tensor(tables(rank, tf.float64)[place])[:10]) for rank in range(2)) / 2
        np.testing.assert_array_equal(tf.cast(tf.convert_to_tensor(mine)[:10], tf.float64), expected)


def test_an_average_over_three_is_as_exact_as_its_dtype():
    def gradients(rank):
        values = tf.constant([[rank + 1.0, 7.0 / (rank + 1)]], tf.float64)
        return [tf.IndexedSlices(values, tf.constant([1]), tf.constant([90_000, 2]))]

    reduced, _ = reduce_on(3, gradients, ["a"], op="average")
    np.testing.assert_allclose(reduced[0].values, [[2.0, (7 + 7 / 2 + 7 / 3) / 3]], rtol=1e-15)


def test_of_tables_of_one_shape_some_are_gathered():
    def gradients(rank):
        def of(rows, touched):
            return tf.IndexedSlices(tf.fill([touched, 2], rank + 1.0), tf.range(touched), tf.constant([rows, 2]))

        return [of(90_000, 5), of(90_000, 80_000), of(50_000, 7), of(60_000, 60_000)]

    reduced, log = reduce_on(2, gradients, ["a", "b", "c", "d"], op="sum")
    assert sorted({without_checksum(what[1]) for what in log}) == [
        "gradient//rows",
        "gradient/a and 3 more/indices",
        "gradient/a and 3 more/values",
        "gradient/b/dense",
        "gradient/d/dense",
    ]
    for each, touched in zip(reduced, [5, 80_000, 7, 60_000], strict=True):
        np.testing.assert_array_equal(tf.convert_to_tensor(each)[:touched], 3)
        assert np.array(tf.convert_to_tensor(each)[touched:]).sum() == 0


def test_a_number_out_of_a_table_stays_out_of_the_others():
    """An embedding on a GPU passes over such rows, and so do its updates."""
    tables = [
        tf.IndexedSlices(tf.ones([2, 2]), tf.constant([index, 1]), tf.constant([9, 2])) for index in (-1, 2**31 - 1)
    ]
    meeting = Meeting(2)
    first, _ = outcomes_on(2, lambda rank: JoinedRows(tables).gather(Replica(meeting, rank), "rows"))
    assert [sorted(each.indices.numpy().tolist()) for each in first] == [[-1, 1], [1, 2**31 - 1]]


def test_tables_that_a_replica_lacks_are_not_added_to_others():
    """Packs of other tables have other names, for which the replicas would wait."""

    def sent(paths):
        _, log = reduce_on(1, lambda rank: [tables(0)[0] for _ in paths], paths, op="sum")
        return {what[1] for what in log if what[1].endswith("/values")}

    assert len(sent(["a", "b", "d"]) | sent(["a", "c", "d"])) == 2


# -- Adasum --


def test_adasum_leaves_the_arithmetic_to_the_exchange():
    _, log = reduce_on(2, five, PATHS, op="adasum")
    assert log == [("adasum", f"gradient/{path}", 1.0, 1.0) for path in "abde"]


def test_adasum_of_rows_is_refused():
    with pytest.raises(ConfigError, match="op='adasum' does not go with sparse_as_dense=False"):
        reduce_on(1, rows, ["table"], op="adasum", sparse_as_dense=False)
    reduce_on(1, rows, ["table"], op="adasum", sparse_as_dense=True)


# -- options --

ADASUM = "op='adasum' does not go with"


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"op": "mean"}, "op must be one of average, sum, adasum. Received: 'mean'."),
        ({"compression": "int8"}, "compression must be one of none, fp16, bf16. Received: 'int8'."),
        ({"groups": -1}, "groups must be at least 0. Received: -1."),
        ({"gradient_predivide_factor": 0.0}, "gradient_predivide_factor must be above 0. Received: 0.0."),
        ({"gradient_predivide_factor": -2.0}, "gradient_predivide_factor must be above 0. Received: -2.0."),
        ({"gradient_predivide_factor": 2.0, "op": "adasum"}, f"{ADASUM} gradient_predivide_factor=2.0"),
        ({"compression": "fp16", "op": "adasum"}, f"{ADASUM} compression='fp16'"),
        ({"groups": (("a", "b"), ("c", "a"))}, "groups must not share a variable. Received: 'a' more than once."),
        ({"groups": 2, "op": "adasum"}, f"{ADASUM} groups=2"),
        ({"groups": (("a",),), "op": "adasum"}, "by itself: leave out groups."),
    ],
)
def test_options_that_make_no_sense_are_refused(options, cause):
    with pytest.raises(ConfigError, match=re.escape(cause)):
        reduction_options(**options)


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
