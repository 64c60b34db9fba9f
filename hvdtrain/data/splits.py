"""Training and validation samples of a data source."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.data.arrays import ArraySource


@dataclass(frozen=True)
class DataSplits:
    """What a recipe trains and validates on."""

    train: ArraySource
    validation: ArraySource
    sample_shape: Any
    """Shape of one input: a tuple, or a nest of them like the inputs."""
    classes: int | None
    """Number of classes; None where the targets do not tell."""
