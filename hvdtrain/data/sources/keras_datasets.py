"""MNIST, Fashion-MNIST and CIFAR by keras.datasets, which downloads them into Keras' cache."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.registry import suggestion
from hvdtrain.data.arrays import array_parts
from hvdtrain.data.files import cache_folder, made_once, writing_into
from hvdtrain.data.source import DataSplits
from hvdtrain.data.sources.images import image_splits


@dataclass(frozen=True)
class KerasDataset:
    """A data set of keras.datasets."""

    file: str
    """Where Keras looks for it, below `datasets/`."""
    classes: int
    names: tuple[str, ...] | None = None
    """Names of the classes, in the order of the labels."""


DATASETS = {
    "mnist": KerasDataset("mnist.npz", 10, tuple("0123456789")),
    "fashion_mnist": KerasDataset(
        "fashion-mnist/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
        10,
        ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
    "cifar10": KerasDataset(
        "cifar-10-batches-py-target_archive",
        10,
        ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    ),
    "cifar100": KerasDataset("cifar-100-python-target_archive", 100),
}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}
"""Files as their authors publish them, which Keras keeps under another name."""


def load(*, name: str = "") -> DataSplits:
    """Load images [height, width, channels] in [0, 1] and their labels, with the test images for validation.

    Args:
        name: `mnist`, `fashion_mnist`, `cifar10` or `cifar100` (with its 100 fine labels).

    Raises:
        ConfigError: another name.
        DataError: it is not in Keras' cache and cannot be downloaded; names the file to put there.
    """
    if name not in DATASETS:
        known = ", ".join(DATASETS)
        raise ConfigError(
            f"keras takes --data-args name NAME, one of {known}. Received: {name!r}."
            f"{suggestion(name, dict.fromkeys(DATASETS, ''))}"
        )
    dataset = DATASETS[name]
    # Keras unpacks archives anew in every process: the ranks of a host would read what others overwrite.
    kept = cache_folder() / f"keras-{name}.npz"
    with made_once(kept) as draft:
        if draft is not None:
            arrays: dict[str, Any] = _loaded(name, dataset)
            with writing_into(kept.parent), open(draft, "wb") as file:
                np.savez(file, **arrays)
    with np.load(kept) as found:
        train, test = (_samples(found[f"x_{part}"], found[f"y_{part}"]) for part in ("train", "test"))
    parts = array_parts(train, test, validation=0, name=name)
    return image_splits(*parts, classes=dataset.classes, names=dataset.names)


def _loaded(name: str, dataset: KerasDataset) -> dict[str, np.ndarray]:
    try:
        (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # of any kind: Keras raises a plain Exception
        home = Path(os.environ.get("KERAS_HOME", "~/.keras")).expanduser()
        named = f", its archive {ARCHIVES[name]} under this name" if name in ARCHIVES else ""
        raise DataError(
            f"{name} can neither be read from Keras' cache nor downloaded into it ({error}). Put it there from another "
            f"machine{named}: {home / 'datasets' / dataset.file}."
        ) from None
    return {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}


def _samples(images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return images if images.ndim == 4 else images[..., np.newaxis], labels.reshape(-1).astype(np.int32)
