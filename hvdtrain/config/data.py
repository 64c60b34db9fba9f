"""Options of the input data."""

import re
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.model import Scalar
from hvdtrain.config.options import excludes, flag, option, section

Tail = Literal["pad", "drop", "repeat"]
Cache = Literal["none", "memory", "file"]
Sharding = Literal["samples", "files"]


MOST_EVALUATED = 256
"""Upper bound on the default evaluation batch."""

BY_NUMBER = excludes(
    "stream",
    why="it is for samples that are read by their numbers",
    instead="leave it out, or use --cache memory, which reads all of them once into memory",
)


def _once_each(changes: tuple[str, ...]) -> None:
    if len(set(changes)) < len(changes):
        raise ConfigError(f"{opt('augment', argument=False)} names one change twice. Received: {' '.join(changes)}.")


def _policy(text: str) -> None:
    if text != "raise" and not re.fullmatch(r"skip:[1-9]\d*", text):
        raise ConfigError(f"{opt('on_bad_record', argument=False)} must be raise or skip:N. Received: {text!r}.")


@section
class DataConfig:
    """Where samples come from and how they form batches."""

    data: str = flag("digits")
    """Name of a data source, or PACKAGE.MODULE:FUNCTION of your own, returning (train, validation)."""
    data_args: dict[str, Scalar] = flag({})
    """Arguments of the data source, as NAME VALUE pairs."""
    batch: int = option(64, "[1, inf)")
    """Samples per optimizer step over all ranks (the global batch)."""
    eval_batch: int | None = flag(None, "[1, inf)")
    """Samples per evaluation step over all ranks; need not divide anything. Default: --batch, but at most 256."""
    shuffle: bool = option(True)
    """Reshuffle the training samples every epoch."""
    tail: Tail = flag("pad", BY_NUMBER)
    """Handling of a final partial batch: keep it short (pad), drop it (drop), or fill it with samples from the start of
    the epoch (repeat). Evaluation always counts each sample once.
    """
    shard_by: Sharding = flag(
        "samples",
        BY_NUMBER,
        excludes("elastic", why="within an epoch its files cannot be divided among other ranks"),
    )
    """Unit of sharding: the samples of each batch, in an order independent of the number of ranks, or whole files, read
    sequentially and shuffled in a buffer, for slow disks. With files, an epoch must end on as many ranks as it began
    on.
    """
    augment: tuple[str, ...] = flag((), BY_NUMBER, valid=_once_each)
    """Augmentations of training images: crop, flip, mixup, in any order."""
    cache: Cache = flag(
        "none",
        excludes("on_bad_record", why="it keeps samples that can be read"),
        excludes("stream", when="file", why=BY_NUMBER.why, instead="use --cache memory, which reads all of them once"),
    )
    """Keep decoded samples in the memory of each rank, or in a file that all ranks of a host share."""
    on_bad_record: str = flag("raise", BY_NUMBER, valid=_policy)
    """Handling of unreadable samples: raise, or skip:N to skip up to N."""
    data_threads: int = flag(0, "[0, inf)", BY_NUMBER)
    """Threads that read and decode on each rank; 0 lets TensorFlow decide."""
    data_memory_mb: int = flag(0, "[0, inf)", BY_NUMBER)
    """MiB that TensorFlow may use for prefetched samples on each rank; 0 lets it decide."""

    @property
    def samples_evaluated(self) -> int:
        """Samples per evaluation step."""
        return min(self.batch, MOST_EVALUATED) if self.eval_batch is None else self.eval_batch

    @property
    def tolerated(self) -> int:
        """Number of unreadable samples to tolerate."""
        return 0 if self.on_bad_record == "raise" else int(self.on_bad_record.removeprefix("skip:"))
