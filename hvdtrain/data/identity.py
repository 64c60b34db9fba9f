"""Identity of the samples: the same on every rank, and the same when a run is resumed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import DataError
from hvdtrain.data.source import DataSplits

Identity = dict[str, dict[str, Any]]
"""Size and fingerprint (hexadecimal) of the training and the validation samples.

The fingerprint is None for a user's own source without one.
"""


def identity_of(splits: DataSplits) -> Identity:
    """Return sizes and fingerprints of `splits`."""
    return {
        part: {
            "samples": source.size,
            "fingerprint": source.fingerprint().hex() if hasattr(source, "fingerprint") else None,
        }
        for part, source in (("training", splits.train), ("validation", splits.validation))
    }


def check_same_samples(before: Mapping[str, Any], now: Identity, run: Path) -> None:
    """Refuse to resume the run in the folder `run` on other samples than `before`.

    Raises:
        DataError: names the split that differs, and its sizes.
    """
    for part, mine in now.items():
        theirs = before[part]
        if mine != theirs:
            then, today = theirs["samples"], mine["samples"]
            sizes = f"{_count(today)} now and {_count(then)} before"
            if today == then:
                sizes = f"{_count(today)} now and before, but others"
            raise DataError(
                f"--resume {run}: the {part} samples are not those that the run was trained with ({sizes}): "
                "their order, and those that are held out, would be others. Give it the data as they were, or start a "
                "new run."
            )


def check_same_data(splits: DataSplits, backend: Backend) -> None:
    """Refuse data that differ by rank. Collective.

    Raises:
        DataError: names a rank that differs, the split, and both sizes.
    """
    if backend.job_size == 1:
        return
    gathered = gather(backend, identity_of(splits), timeout=None)
    for rank, other in enumerate(gathered):
        for part, first in gathered[0].items():
            if other[part] != first:
                raise DataError(
                    f"The {part} samples of rank {rank} are not those of rank 0 ({_count(other[part]['samples'])} and "
                    f"{_count(first['samples'])}): all ranks must load the same data in the same order. Draw from "
                    "generators with a seed (a --data function is given one if it names it), and sort the files of a "
                    "folder."
                )


def _count(samples: int | None) -> str:
    return "streamed" if samples is None else f"{samples:,}"
