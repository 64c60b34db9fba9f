"""Options of the input data."""

import re
from dataclasses import field
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.model import Scalar
from hvdtrain.config.section import section

Tail = Literal["pad", "drop", "repeat"]
Cache = Literal["none", "memory", "file"]
Sharding = Literal["samples", "files"]


MOST_EVALUATED = 256
"""Upper bound on the default evaluation batch."""


@section
class DataConfig:
    """Where samples come from and how they form batches."""

    data: str = "digits"
    """Name of a data source, or PACKAGE.MODULE:FUNCTION of your own, returning (train, validation)."""
    data_args: dict[str, Scalar] = field(default_factory=dict)
    """Arguments of the data source, as NAME VALUE pairs."""
    batch: int = 64
    """Samples per optimizer step over all ranks (the global batch)."""
    eval_batch: int | None = None
    """Samples per evaluation step over all ranks; need not divide anything. Default: --batch, but at most 256."""
    shuffle: bool = True
    """Reshuffle the training samples every epoch."""
    tail: Tail = "pad"
    """Handling of a final partial batch: keep it short (pad), drop it (drop), or fill it with samples from the start of
    the epoch (repeat). Evaluation always counts each sample once.
    """
    shard_by: Sharding = "samples"
    """Unit of sharding: the samples of each batch, in an order independent of the number of ranks, or whole files, read
    sequentially and shuffled in a buffer, for slow disks. With files, an epoch must end on as many ranks as it began
    on.
    """
    augment: tuple[str, ...] = ()
    """Augmentations of training images: crop, flip, mixup, in any order."""
    cache: Cache = "none"
    """Keep decoded samples in the memory of each rank, or in a file that all ranks of a host share."""
    on_bad_record: str = "raise"
    """Handling of unreadable samples: raise, or skip:N to skip up to N."""
    data_threads: int = 0
    """Threads that read and decode on each rank; 0 lets TensorFlow decide."""
    data_memory_mb: int = 0
    """MiB that TensorFlow may use for prefetched samples on each rank; 0 lets it decide."""

    def __post_init__(self) -> None:
        for name in ("batch", "eval_batch"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{opt(name)} must be at least 1. Received: {getattr(self, name)}.")
        for name in ("data_threads", "data_memory_mb"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{opt(name)} must not be negative. Received: {getattr(self, name)}.")
        if self.on_bad_record != "raise" and not re.fullmatch(r"skip:[1-9]\d*", self.on_bad_record):
            raise ConfigError(f"--on-bad-record must be raise or skip:N. Received: {self.on_bad_record!r}.")
        if len(set(self.augment)) < len(self.augment):
            raise ConfigError(f"--augment names one change twice. Received: {' '.join(self.augment)}.")
        if self.cache != "none" and self.tolerated:
            raise ConfigError(
                "--cache keeps samples that can be read: it cannot be combined with --on-bad-record skip:N."
            )

    @property
    def samples_evaluated(self) -> int:
        """Samples per evaluation step."""
        return min(self.batch, MOST_EVALUATED) if self.eval_batch is None else self.eval_batch

    @property
    def tolerated(self) -> int:
        """Number of unreadable samples to tolerate."""
        return 0 if self.on_bad_record == "raise" else int(self.on_bad_record.removeprefix("skip:"))
