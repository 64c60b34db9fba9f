"""Training and validation samples of a named data source."""

from dataclasses import dataclass

from hvdtrain.data.arrays import ArraySource


@dataclass(frozen=True)
class DataSplits:
    """What a recipe trains and validates on."""

    train: ArraySource
    validation: ArraySource
    sample_shape: tuple[int, ...]
    """Shape of one input."""
    classes: int
    """Number of classes."""
