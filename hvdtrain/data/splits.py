"""Training and validation samples of a data source."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.data.source import Source


@dataclass(frozen=True)
class DataSplits:
    """What a recipe trains and validates on."""

    train: Source
    validation: Source
    sample_shape: Any
    """Shape of one input: a tuple, or a nest of them like the inputs."""
    classes: int | None
    """Number of classes; None where the targets do not tell."""
    finish: Callable[..., tuple[Any, ...]] | None = None
    """What is done to the parts of every batch last, after augmentation: bytes of pixels become numbers in [0, 1]."""
