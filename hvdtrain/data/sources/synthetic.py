"""Random images with random labels, for measuring speed."""

import numpy as np

from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.splits import DataSplits


def load(*, size: int = 32, channels: int = 3, classes: int = 10, samples: int = 4096, nan_at: int = -1) -> DataSplits:
    """Return `samples` images [size, size, channels] of normal noise and uniform labels.

    Args:
        size: height and width in pixels.
        channels: channels of a pixel.
        classes: number of labels.
        samples: training samples; validation has an eighth as many.
        nan_at: number of a training sample whose first pixel is NaN, to test how a run reports it; -1: none.
    """
    rng = np.random.default_rng(0)

    def part(count: int, name: str) -> ArraySource:
        images = rng.standard_normal((count, size, size, channels), dtype=np.float32)
        if name == "training" and 0 <= nan_at < count:
            images[nan_at, 0, 0, 0] = np.nan
        labels = rng.integers(0, classes, count, dtype=np.int32)
        return ArraySource((images, labels), f"synthetic ({name})")

    return DataSplits(
        train=part(samples, "training"),
        validation=part(max(1, samples // 8), "validation"),
        sample_shape=(size, size, channels),
        classes=classes,
    )
