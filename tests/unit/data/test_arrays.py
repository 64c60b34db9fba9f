"""Sources of arrays."""

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data import arrays
from hvdtrain.data.arrays import ArraySource, FileRows

ROWS = np.random.default_rng(0).standard_normal((40, 3, 2))
LABELS = np.arange(40)


@pytest.fixture(params=["npy", pytest.param("h5", marks=pytest.mark.extended)])
def in_file(request, tmp_path, monkeypatch):
    """The rows in a file, which counts as large."""
    monkeypatch.setattr(arrays, "LARGE", ROWS.nbytes)
    if request.param == "npy":
        np.save(tmp_path / "rows.npy", ROWS)
        yield np.load(tmp_path / "rows.npy", mmap_mode="r")
        return
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        yield file.create_dataset("rows", data=ROWS)


class Loader:
    """An iterable of batches, as PyTorch's."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter([(ROWS[:8], LABELS[:8])] * 2)


@pytest.mark.parametrize("data", [Loader(), (Loader(),), iter(Loader()), zip(ROWS, LABELS, strict=True)])
def test_iterables_of_batches_are_refused_with_what_to_write(data):
    with pytest.raises(DataError, match=r"mine must be arrays, or batches.* lambda: iter\(loader\)"):
        ArraySource(data, "mine")


def test_rows_of_a_large_array_are_read_from_its_file(in_file):
    source = ArraySource((in_file, LABELS))
    assert isinstance(source.elements[0], FileRows)
    numbers = tf.constant([7, 3, 7, 39], tf.int64)
    rows, labels = source.gather(numbers)
    np.testing.assert_array_equal(rows, ROWS[numbers].astype("float32"))
    np.testing.assert_array_equal(labels, numbers)
    part = source.part(slice(30, None), "held out")
    assert (part.size, part.name) == (10, "held out")
    assert isinstance(part.elements[0], FileRows)
    np.testing.assert_array_equal(part.gather(tf.constant([1, 0]))[0], ROWS[[31, 30]].astype("float32"))
    np.testing.assert_array_equal(np.asarray(part.elements[0]), ROWS[30:].astype("float32"))


def test_a_large_array_is_told_from_another_by_some_of_its_rows(in_file):
    source = ArraySource((in_file, LABELS))
    assert source.fingerprint() == ArraySource((in_file, LABELS)).fingerprint()
    assert source.fingerprint() != source.part(slice(0, 20), "half").fingerprint()


def test_small_arrays_in_files_are_read_as_a_whole(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    assert tf.is_tensor(ArraySource((np.load(tmp_path / "rows.npy", mmap_mode="r"), LABELS)).elements[0])


@pytest.mark.usefixtures("session")
def test_training_on_a_file_is_training_on_its_values(in_file):
    from hvdtrain import Trainer

    def trained(x):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3, 2)), keras.layers.Flatten(), keras.layers.Dense(4)])
        trainer = Trainer(model, "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        given = {"batch": 8, "epochs": 2, "validation_split": 0.2, "class_weight": {0: 2.0}, "verbose": 0}
        history = trainer.fit(x, LABELS % 4, **given).history
        return [*model.get_weights(), *trainer.predict(x), *history.values()]

    for ours, theirs in zip(trained(in_file), trained(ROWS), strict=True):
        np.testing.assert_array_equal(ours, theirs)
