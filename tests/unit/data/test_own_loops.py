"""Data of a loop of the user's own, divided among the ranks."""

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.order import Order
from hvdtrain.data.own_loops import _sharded
from tests.unit.gathering import on_ranks

SAMPLES, BATCH = 21, 8
X = np.arange(SAMPLES)


def squares():
    return tf.data.Dataset.from_tensor_slices(X).map(lambda n: {"number": n, "square": n * n})


def divided(build, size):
    """Return the batches of each rank."""
    parts = on_ranks(size, lambda backend: [part for part in _sharded(*build(), backend).as_numpy_iterator()])
    return parts if not any(isinstance(part, Exception) for part in parts) else str(parts[0])


def mapped():
    return (dataset := squares()), dataset.batch(BATCH)


def whole():
    dataset = squares().cache().batch(BATCH)
    return dataset, dataset


@pytest.mark.parametrize("build", [mapped, whole])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_take_as_many_steps_of_as_many_samples_in_the_order_of_the_dataset(build, size):
    parts = divided(build, size)
    assert {len(part) for part in parts} == {3}
    for step, total in enumerate([8, 8, 5]):
        rows = [part[step]["number"].tolist() for part in parts]
        assert {len(row) for row in rows} == {-(-total // size)}
        together = [number for row in rows for number in row]
        # What is short of samples goes on with the first of the batch.
        assert together == [8 * step + place % total for place in range(len(together))]
    assert all((part[1]["square"] == part[1]["number"] ** 2).all() for part in parts)


def test_ranks_with_other_data_are_refused_and_told_how_to_divide_them():
    said = divided(lambda: (dataset := tf.data.Dataset.range(9).shuffle(9), dataset.batch(3)), 3)
    assert "reads the training data in another order than rank 0" in said
    assert "Give shuffle() a seed" in said


@pytest.mark.usefixtures("session")
def test_what_cannot_be_divided_is_refused():
    samples = tf.data.Dataset.range(9)
    assert [part.numpy().tolist() for part in hvdtrain.shard(samples, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert len(list(hvdtrain.shard(samples, batch=4, drop_remainder=True))) == 2
    with pytest.raises(ConfigError, match=r"not batched: pass shard\(dataset, batch=N\)"):
        hvdtrain.shard(samples)
    with pytest.raises(ConfigError, match="drop_remainder is for samples"):
        hvdtrain.shard(samples.batch(4), drop_remainder=True)
    with pytest.raises(DataError, match="The dataset is empty"):
        hvdtrain.shard(samples.take(0), batch=4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_indices_are_those_of_the_order_of_arrays(size):
    ranks = [hvdtrain.ShardedOrder(SAMPLES, BATCH, seed=5, rank=rank, size=size) for rank in range(size)]
    for epoch in range(2):
        steps = list(zip(*(rank.indices(epoch) for rank in ranks), strict=True))
        assert len(steps) == len(ranks[0]) == 3
        assert all(len({len(rows) for rows in step}) == 1 for step in steps)
        visited = [np.concatenate(step)[:total] for step, total in zip(steps, [8, 8, 5], strict=True)]
        assert np.concatenate(visited).tolist() == Order(SAMPLES, BATCH, 5).numbers(epoch, X).numpy().tolist()


def test_an_order_may_be_plain_or_dropped():
    order = hvdtrain.ShardedOrder(SAMPLES, BATCH, shuffle=False, drop_remainder=True, rank=1, size=2)
    assert [rows.tolist() for rows in order.indices(3)] == [[4, 5, 6, 7], [12, 13, 14, 15]]
    for wrong, said in (((3, 8), "would leave nothing of 3 samples"), ((9, 3), "does not divide among 2 ranks")):
        with pytest.raises(ConfigError, match=said):
            hvdtrain.ShardedOrder(*wrong, drop_remainder=True, rank=0, size=2)
    with pytest.raises(DataError, match="at least one sample"):
        hvdtrain.ShardedOrder(0, 8, rank=0, size=1)
