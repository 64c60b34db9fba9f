"""Options of the input data."""

from dataclasses import field

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import Scalar
from hvdtrain.config.section import section


@section
class DataConfig:
    """Where samples come from and how they form batches."""

    data: str = "digits"
    """Name of a data source, or PACKAGE.MODULE:FUNCTION of your own, which returns (train, validation)."""
    data_args: dict[str, Scalar] = field(default_factory=dict)
    """Arguments of the data source, as NAME VALUE pairs."""
    batch: int = 64
    """Samples per optimizer step over all ranks (the global batch)."""
    eval_batch: int = 256
    """Samples per evaluation step over all ranks; need not divide anything."""
    shuffle: bool = True
    """Visit the training samples in a new order every epoch."""

    def __post_init__(self) -> None:
        for name in ("batch", "eval_batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1. Received: {getattr(self, name)}.")
