"""scikit-learn's bundled handwritten digits: 1,797 grey images of 8 x 8 pixels, on every machine."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.splits import DataSplits

VALIDATION_SAMPLES = 360
SPLIT_SEED = 1797


def load() -> DataSplits:
    """Return 1,437 training and 360 validation images [8, 8, 1] in [0, 1], in a fixed stratified split."""
    bunch = load_digits()
    images = (bunch.images / 16.0).astype(np.float32)[..., np.newaxis]
    labels = bunch.target.astype(np.int32)
    train_x, val_x, train_y, val_y = train_test_split(
        images, labels, test_size=VALIDATION_SAMPLES, stratify=labels, shuffle=True, random_state=SPLIT_SEED
    )
    return DataSplits(
        train=ArraySource((train_x, train_y), "digits (training)"),
        validation=ArraySource((val_x, val_y), "digits (validation)"),
        sample_shape=(8, 8, 1),
        classes=10,
    )
