"""Handwritten digits that come with the package: 1,797 grey images of 8 x 8 pixels (`digits.txt`: source, licence)."""

from pathlib import Path

import numpy as np

from hvdtrain.data.arrays import ArraySource, hold_out
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.data.source import DataSplits

VALIDATION_SAMPLES = 360
WHITE = 16.0


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images float32 [1797, 8, 8, 1] in [0, 1] and labels int32 [1797]."""
    with np.load(Path(__file__).with_suffix(".npz")) as arrays:
        return arrays["images"][..., np.newaxis].astype(np.float32) / WHITE, arrays["labels"].astype(np.int32)


def load() -> DataSplits:
    """Load 1,437 training and 360 validation images [8, 8, 1] in [0, 1], in a fixed stratified split."""
    images, labels = load_digits()
    train, validation = hold_out(ArraySource((images, labels), "digits"), VALIDATION_SAMPLES, labels)
    return DataSplits(
        train=train,
        validation=validation,
        sample_shape=(8, 8, 1),
        classes=10,
        preprocessing=Preprocessing(tuple("0123456789"), image=ImageInputs(8, 8, 1, white=WHITE)),
        held_out=True,
    )
