"""Training and validation samples of a data source."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.data.preprocessing import Preprocessing
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
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    """How raw data become inputs, and the names of the classes: kept with the run, for evaluation and prediction."""
    held_out: bool = False
    """Whether the validation samples are some of the training data, which have none of their own."""
