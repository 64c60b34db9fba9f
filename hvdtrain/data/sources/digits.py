"""scikit-learn's bundled handwritten digits: 1,797 grey images of 8 x 8 pixels, on every machine."""

import importlib.util
from pathlib import Path

import numpy as np

from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.data.splits import DataSplits
from hvdtrain.data.subset import hold_out

VALIDATION_SAMPLES = 360
WHITE = 16.0


def load() -> DataSplits:
    """Load 1,437 training and 360 validation images [8, 8, 1] in [0, 1], in a fixed stratified split.

    Raises:
        DataError: scikit-learn is not installed.
    """
    rows = np.loadtxt(_file(), delimiter=",", dtype=np.float32)
    images = (rows[:, :-1] / WHITE).reshape(-1, 8, 8, 1)
    labels = rows[:, -1].astype(np.int32)
    train, validation = hold_out(ArraySource((images, labels), "digits"), VALIDATION_SAMPLES, labels)
    return DataSplits(
        train=train,
        validation=validation,
        sample_shape=(8, 8, 1),
        classes=10,
        preprocessing=Preprocessing(tuple("0123456789"), image=ImageInputs(8, 8, 1, white=WHITE)),
        held_out=True,
    )


def _file() -> Path:
    """Return the path of the table of pixels and labels; importing scikit-learn to load it takes a second."""
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise DataError("The digits come with scikit-learn, which is not installed: pip install scikit-learn.")
    return Path(found.submodule_search_locations[0]) / "datasets/data/digits.csv.gz"
