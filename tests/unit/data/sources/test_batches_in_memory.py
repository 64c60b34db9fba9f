"""Batches of a user's own kind of data, read once by `--data MODULE:FUNCTION --cache memory`."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.sources.user_data import splits_of

X = np.random.default_rng(0).random((10, 3)).astype("float32")
Y = np.arange(10) % 4
SLICES = tf.data.Dataset.from_tensor_slices((X, Y))


class Batches(keras.utils.PyDataset):
    def __init__(self, count=4):
        super().__init__(workers=2)
        self._count = count

    @property
    def num_batches(self):
        return self._count

    def __getitem__(self, index):
        return X[3 * index : 3 * index + 3], Y[3 * index : 3 * index + 3]


def generator():
    for first in range(0, 10, 4):
        yield X[first : first + 4], Y[first : first + 4]


KINDS = {
    "samples": lambda: SLICES,
    "batches": lambda: SLICES.batch(4),
    "batches of one size": lambda: SLICES.batch(5, drop_remainder=True),
    "batches of what size": lambda: SLICES.batch(4).filter(lambda *_: True),
    "a PyDataset": Batches,
    "a generator": generator,
    "a generator function": lambda: generator,
    "a function": lambda: lambda: iter([(X[:7], Y[:7]), (X[7:], Y[7:])]),
}


def splits(train, validation=None):
    return splits_of((train, (X[:2], Y[:2]) if validation is None else validation), "mypkg:data", held=True)


@pytest.mark.parametrize("kind", KINDS)
def test_the_samples_are_those_of_the_arrays_in_their_order(kind):
    with pytest.warns(UserWarning, match=r"10 samples of --data mypkg:data \(training\) were read once"):
        found = splits(KINDS[kind]())
    arrays = splits((X, Y))
    assert found.train.fingerprint() == arrays.train.fingerprint()
    assert (found.train.size, found.sample_shape, found.classes) == (10, (3,), 4)
    assert found.validation.size == 2


@pytest.mark.filterwarnings("ignore:.*were read once")
def test_vectors_as_targets_do_not_make_a_sample_a_batch():
    rows = tf.data.Dataset.from_tensor_slices((X, keras.utils.to_categorical(Y, 4)))
    found = splits(rows, rows.batch(2))
    assert (found.train.size, found.validation.size, found.sample_shape, found.classes) == (10, 10, (3,), 4)


@pytest.mark.filterwarnings("ignore:.*were read once")
def test_nests_and_weights_come_along():
    nest = tf.data.Dataset.from_tensor_slices(({"a": X, "b": X[:, :2]}, Y, np.ones(10)))
    found = splits(nest, nest.batch(3))
    assert found.sample_shape == {"a": (3,), "b": (2,)}
    assert [len(part.elements) for part in (found.train, found.validation)] == [3, 3]
    assert found.train.fingerprint() == found.validation.fingerprint()


def odd():
    yield X[:4], Y[:4]
    yield X[4:, :2], Y[4:]


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (SLICES.repeat(), r"--data mypkg:data \(training\) never ends and cannot be held"),
        (Batches(None), r"use take\(\), or leave out --cache and pass --steps-per-epoch N"),
        (SLICES.take(0), r"--data mypkg:data \(training\) holds no samples"),
        (Batches(0), "holds no samples"),
        (odd, r"Batch 1 of --data mypkg:data \(training\) holds .*float32\[2\].* and the first one .*float32\[3\]"),
        (tf.data.Dataset.from_tensor_slices(X), r"must give batches \(inputs, targets\)"),
        (lambda: 3, "must be a generator function of global batches. It returned: int"),
    ],
)
def test_what_cannot_be_held_is_named(data, answer):
    with pytest.raises(DataError, match=answer):
        splits(data)
