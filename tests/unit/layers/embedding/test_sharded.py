"""Tables divided among ranks: who holds what, lookups between threads that stand for ranks, and what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.layers.embedding import Partition, ShardedEmbedding, Table, look_up, look_up_columns
from hvdtrain.models.registry import model_family
from tests.unit.threaded_exchange import Meeting, outcomes_on


def box(begin, end, left, right):
    return slice(begin, end), slice(left, right)


@pytest.mark.parametrize(
    ("sharding", "owner", "expected"),
    [
        ("none", 0, [box(0, 5, 0, 6)] * 3),
        ("row", 0, [box(0, 2, 0, 6), box(2, 4, 0, 6), box(4, 5, 0, 6)]),
        ("column", 0, [box(0, 5, 0, 2), box(0, 5, 2, 4), box(0, 5, 4, 6)]),
        ("table", 4, [box(0, 0, 0, 6), box(0, 5, 0, 6), box(0, 0, 0, 6)]),
    ],
)
def test_each_rank_holds_its_part_of_a_table(sharding, owner, expected):
    partition = Partition(5, 6, sharding, 3, owner)
    assert [partition.box(rank) for rank in range(3)] == expected


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ((5, 6, "rows", 2), "sharded by none, table, row, column. Received: 'rows'."),
        ((0, 6, "row", 2), "needs positive sizes. Received: rows=0, dim=6."),
        ((5, 7, "column", 2), "Received: 7 columns, 2 ranks."),
    ],
)
def test_what_makes_no_partition_is_refused(arguments, cause):
    with pytest.raises(ConfigError) as refused:
        Partition(*arguments)
    assert cause in str(refused.value)


class Rank:
    """One thread's way to exchange rows with the others."""

    def __init__(self, meeting, index):
        self.meeting, self.size, self.index = meeting, meeting.size, index

    def exchange_rows(self, tensor, rows, *, name):
        parts = tf.split(tensor, rows.numpy())
        brought = self.meeting.put_together(self.index, name, parts)
        came = [sent[self.index] for sent in brought]
        return tf.concat(came, 0), tf.constant([len(part) for part in came])


@pytest.mark.parametrize("sharding", ["table", "row", "column"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_and_their_gradients_are_those_of_whole_tables(sharding, ranks):
    rng = np.random.default_rng(0)
    wholes = [rng.standard_normal((size, 6)) for size in (5, 1, 4)]
    partitions = [Partition(len(w), 6, sharding, ranks, owner) for owner, w in enumerate(wholes)]
    # Ranks ask for different numbers of rows, for some of them twice, and one of a table for none.
    asked = [[rng.integers(0, len(w), 3 + rank - place) for place, w in enumerate(wholes)] for rank in range(ranks)]
    slopes = [[rng.standard_normal((len(rows), 6)) for rows in each] for each in asked]
    meeting = Meeting(ranks)

    def body(index):
        tables = [Table(p, tf.Variable(w[p.box(index)])) for p, w in zip(partitions, wholes, strict=True)]
        search = look_up_columns if sharding == "column" else look_up
        rows = [tf.constant(rows, tf.int64) for rows in asked[index]]
        with tf.GradientTape() as tape:
            found = search(tables, rows, Rank(meeting, index), name="test")
            loss = tf.add_n([tf.reduce_sum(x * slope) for x, slope in zip(found, slopes[index], strict=True)])
        gradients = tape.gradient(loss, [table.part for table in tables])
        return [x.numpy() for x in found], [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]

    outcomes = outcomes_on(ranks, body)
    for place, (whole, partition) in enumerate(zip(wholes, partitions, strict=True)):
        expected = np.zeros_like(whole)
        for each, slope in zip(asked, slopes, strict=True):
            np.add.at(expected, each[place], slope[place])
        for rank, (found, gradients) in enumerate(outcomes):
            np.testing.assert_array_equal(found[place], whole[asked[rank][place]])
            np.testing.assert_allclose(gradients[place], expected[partition.box(rank)], atol=1e-12)


@pytest.mark.parametrize("sharding", ["none", "row"])
def test_in_one_process_it_is_an_embedding_like_any_other(sharding):
    draw = keras.initializers.RandomUniform(-0.2, 0.2, seed=3)
    plain = keras.layers.Embedding(7, 4, embeddings_initializer=draw)
    ours = ShardedEmbedding(7, 4, sharding, bound=0.2, seed=3)
    x = np.random.default_rng(0).integers(0, 7, (3, 2, 5))
    np.testing.assert_array_equal(ours(x), plain(x))
    assert [w.name for w in ours.weights] == [w.name for w in plain.weights]
    again = ShardedEmbedding.from_config(ours.get_config())
    np.testing.assert_array_equal(again(x), ours(x))
    assert keras.Sequential([keras.Input((5,), dtype="int32"), ours]).output_shape == (None, 5, 4)
    narrow = ShardedEmbedding(7, 4, seed=3, dtype="mixed_float16")
    assert (narrow(x).dtype, narrow.embeddings.dtype) == (tf.float16, "float32")


def test_tables_are_divided_among_all_ranks_unless_parallel_says_otherwise():
    divided = ModelConfig("dlrm", embedding_sharding="row")
    assert Config("dlrm", divided).processes.parallel == "ep=-1"
    assert Config("dlrm", divided, runtime=RuntimeConfig(parallel="dp=2,ep=2")).processes.parallel == "dp=2,ep=2"
    assert Config("dlrm").processes == RuntimeConfig()
    with pytest.raises(ConfigError, match="Name ep there, or leave it out"):
        Config("dlrm", divided, runtime=RuntimeConfig(parallel="tp=2"))


def test_a_model_without_tables_to_divide_is_refused():
    with pytest.raises(ConfigError, match="divides the tables of"):
        model_family(ModelConfig("mlp", embedding_sharding="row"))
