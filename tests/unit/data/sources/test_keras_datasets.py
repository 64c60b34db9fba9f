"""Data sets of keras.datasets: read from Keras' cache, once for the ranks of a host."""

import gzip
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.registry import load_splits


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))


def load(name):
    return load_splits(DataConfig("keras", {"name": name}))


def as_keras(shape, classes, *, column):
    """What a `load_data` returns: CIFAR's labels are a column."""
    rng = np.random.default_rng(0)

    def part(count):
        labels = rng.integers(0, classes, (count, 1) if column else count).astype("uint8")
        return rng.integers(0, 256, (count, *shape)).astype("uint8"), labels

    return part(20), part(5)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "named"),
    [
        ("mnist", (28, 28), 10, "0"),
        ("fashion_mnist", (28, 28), 10, "T-shirt/top"),
        ("cifar10", (32, 32, 3), 10, "airplane"),
        ("cifar100", (32, 32, 3), 100, None),
    ],
)
def test_images_and_labels_are_those_of_keras(monkeypatch, name, shape, classes, named):
    data, calls = as_keras(shape, classes, column=len(shape) == 3), []
    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", lambda: calls.append(name) or data)
    for _ in range(2):
        splits = load(name)
    assert calls == [name]  # the second time it is read from our own cache
    assert (splits.sample_shape, splits.classes) == ((*shape, 1)[:3], classes)
    assert (splits.preprocessing.class_names or (None,))[0] == named
    for source, (images, labels) in zip((splits.train, splits.validation), data, strict=True):
        inputs, targets = splits.finish(*source.gather(tf.range(source.size)))
        assert targets.numpy().tolist() == labels.ravel().tolist()
        np.testing.assert_allclose(inputs.numpy().reshape(images.shape), images / 255, atol=1e-7)


def test_another_name_is_refused():
    with pytest.raises(ConfigError, match=r"one of mnist, .*, cifar100.*Perhaps you meant: cifar10"):
        load("cifar")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mnist", "datasets/mnist.npz."),
        (
            "cifar10",
            "machine, its archive cifar-10-python.tar.gz under this name: "
            "HOME/datasets/cifar-10-batches-py-target_archive.",
        ),
    ],
)
def test_without_a_network_the_message_names_the_file(monkeypatch, tmp_path, name, said):
    def load_data():
        raise Exception("URL fetch failure on https://nowhere: None -- unreachable")

    monkeypatch.setattr(getattr(keras.datasets, name), "load_data", load_data)
    with pytest.raises(DataError, match=r"downloaded into it \(URL fetch failure on https://nowhere") as raised:
        load(name)
    assert said.replace("HOME", str(tmp_path / "keras")) in str(raised.value)


@pytest.mark.extended
def test_files_that_were_put_into_the_cache_are_read(tmp_path):
    folder = tmp_path / "keras/datasets/fashion-mnist"
    folder.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        images = np.full((count, 28, 28), count, np.uint8)
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(bytes(16) + images.tobytes())
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes(8) + bytes(range(count)))
    code = """
from hvdtrain.data.sources.keras_datasets import load
splits = load(name="fashion_mnist")
(image, *_), _ = splits.validation.gather([0])
print(splits.train.size, splits.validation.size, splits.train.gather([5])[1].numpy(), image.numpy().max())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "6 3 [5] 3\n", done.stderr
