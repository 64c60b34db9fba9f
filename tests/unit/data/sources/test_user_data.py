"""Batches of a user's own kind of data: read once into memory, or streamed."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig
from hvdtrain.data.identity import check_same_samples, identity_of
from hvdtrain.data.sources.user_data import StreamSource, splits_of
from hvdtrain.runs.run_data import check_loaded, evaluation_of, stream_training

X = np.random.default_rng(0).random((10, 3)).astype("float32")
Y = np.arange(10) % 4
SLICES = tf.data.Dataset.from_tensor_slices((X, Y))
ARRAYS = (X, Y)


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


# -- streams --


def training(data, batch=4, steps=None, **options):
    config = Config("digits", data=DataConfig(batch=batch, **options), training=TrainingConfig(steps_per_epoch=steps))
    return stream_training(StreamSource(data, "mypkg:data"), config, SingleBackend(None))


@pytest.mark.parametrize("data", [SLICES, SLICES.batch(4), SLICES.batch(3), generator])
def test_batches_are_those_that_were_asked_for(data):
    batches = training(data)
    assert batches.steps_per_epoch == 3
    stream = batches.batches(0)
    read = [next(stream).targets.numpy().tolist() for _ in range(4)]
    assert read == [Y[:4].tolist(), Y[4:8].tolist(), Y[8:].tolist(), Y[:4].tolist()]


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (SLICES.repeat(), {}, "pass steps_per_epoch"),
        (generator, {"batch": 8}, "of 4 samples. Received: batch 8. Use batch=4"),
        (
            SLICES,
            {"augment": ("flip",)},
            "augment does not go with mypkg:data, .*it is for samples that are read",
        ),
        (SLICES, {"tail": "drop"}, "tail .*does not go with .*it is for samples"),
        (SLICES, {"shard_by": "files"}, "shard-by .*does not go with .*it is for samples"),
        (SLICES, {"on_bad_record": "skip:1"}, "on-bad-record .*does not go with .*it is for samples"),
        (SLICES, {"cache": "file"}, "cache file does not go with .*it is for samples"),
        (SLICES, {"data_threads": 2}, "data-threads .*does not go with .*it is for samples"),
        (SLICES, {"data_memory_mb": 2}, "data-memory-mb .*does not go with .*it is for samples"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(data, options, said):
    with pytest.raises(ConfigError, match=said):
        training(data, **options)


def test_an_empty_stream_is_refused():
    with pytest.raises(DataError, match="mypkg:data holds no samples"):
        StreamSource(SLICES.take(0), "mypkg:data")


def test_validation_that_never_ends_takes_steps():
    config = DataConfig(eval_batch=5)
    splits = splits_of((SLICES, SLICES.repeat()), "mypkg:data")
    with pytest.raises(ConfigError, match="pass validation_steps"):
        evaluation_of(splits.validation, config, splits, SingleBackend(None))
    batches = evaluation_of(splits.validation, config, splits, SingleBackend(None), steps=3)
    assert [len(batch.targets) for batch in batches] == [5, 5, 5]


def test_a_resumed_run_has_the_same_first_batch(tmp_path):
    before = identity_of(check_loaded(DataConfig(), splits_of((SLICES, ARRAYS), "a:b"), SingleBackend(None)))
    check_same_samples(before, identity_of(splits_of((SLICES, ARRAYS), "a:b")), tmp_path)
    with pytest.raises(DataError, match=r"the training samples are not those .*streamed now and before, but others"):
        check_same_samples(before, identity_of(splits_of((SLICES.skip(1), ARRAYS), "a:b")), tmp_path)
