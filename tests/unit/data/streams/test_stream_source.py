"""A user's batches as a split of a run that is streamed."""

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
from hvdtrain.data.sources.user_data import splits_of
from hvdtrain.data.streams.stream_source import StreamSource
from hvdtrain.runs.run_data import check_loaded, evaluation_of, stream_training

X = np.random.default_rng(0).random((10, 3)).astype("float32")
Y = np.arange(10) % 4
SLICES = tf.data.Dataset.from_tensor_slices((X, Y))
ARRAYS = (X, Y)


def generator():
    for first in range(0, 10, 4):
        yield X[first : first + 4], Y[first : first + 4]


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


def test_every_epoch_draws_anew():
    noisy = SLICES.map(lambda x, y: (x + tf.random.uniform([]), y)).batch(10)
    stream = training(noisy, 10).batches(0)
    assert not np.array_equal(next(stream).inputs, next(stream).inputs)


def test_splits_tell_shapes_and_classes_as_far_as_they_are_known():
    labels = splits_of((SLICES, ARRAYS), "mypkg:data")
    assert (labels.sample_shape, labels.classes, labels.train.size, labels.validation.size) == ((3,), None, None, 10)
    one_hot = tf.data.Dataset.from_tensor_slices((X, keras.utils.to_categorical(Y, 4))).batch(5)
    assert splits_of((one_hot, one_hot), "mypkg:data").classes == 4
    with pytest.warns(UserWarning, match="were read once"):
        held = splits_of((generator(), ARRAYS), "mypkg:data")
    assert held.train.size == 10, "a generator object is read once"


@pytest.mark.parametrize(
    ("data", "options", "said"),
    [
        (SLICES.repeat(), {}, "pass steps_per_epoch"),
        (generator, {"batch": 8}, "of 4 samples. Received: batch 8. Use batch=4"),
        (SLICES, {"augment": ("flip",)}, "augment is for samples that are read by their numbers"),
        (SLICES, {"tail": "drop"}, "tail is for samples"),
        (SLICES, {"shard_by": "files"}, "shard-by is for samples"),
        (SLICES, {"on_bad_record": "skip:1"}, "on-bad-record is for samples"),
        (SLICES, {"cache": "file"}, "cache file is for samples"),
        (SLICES, {"data_threads": 2}, "data-threads is for samples"),
        (SLICES, {"data_memory_mb": 2}, "data-memory-mb is for samples"),
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
