"""Training and validation samples of a data source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.data.source import Source


@dataclass(frozen=True)
class DataSplits:
    """The samples that a run trains and validates on, and their properties."""

    train: Source
    validation: Source
    sample_shape: Any
    """Shape of one input: a tuple, or a nest of them like the inputs."""
    classes: int | None
    """Number of classes; None if the targets are not labels."""
    finish: Callable[..., tuple[Any, ...]] | None = None
    """Last transformation of every batch, after augmentation: uint8 pixels become floats in [0, 1]."""
