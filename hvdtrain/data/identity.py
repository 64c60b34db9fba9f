"""Identity of the samples: the same on every rank, and the same when a run is resumed."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import DataError
from hvdtrain.data.source import DataSplits, Source

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

    def count(samples: int | None) -> str:
        return "streamed" if samples is None else f"{samples:,}"

    for part, mine in now.items():
        theirs = before[part]
        if mine != theirs:
            then, today = theirs["samples"], mine["samples"]
            sizes = f"{count(today)} now and {count(then)} before"
            if today == then:
                sizes = f"{count(today)} now and before, but others"
            raise DataError(
                f"--resume {run}: the {part} samples are not those that the run was trained with ({sizes}): "
                "their order, and those that are held out, would be others. Give it the data as they were, or start a "
                "new run."
            )


def check_same_data(splits: DataSplits, backend: Backend) -> None:
    """Refuse data that differ by rank. Collective.

    Raises:
        DataError: names a rank that differs, the split, and the first file that differs where samples are in files.
    """
    if backend.job_size == 1:
        return
    mine = [source.fingerprint().hex() for source in (splits.train, splits.validation)]
    gathered = gather(backend, mine, timeout=None)
    for rank, other in enumerate(gathered):
        if other != gathered[0]:
            part = "training" if other[0] != gathered[0][0] else "validation"
            difference = _first_difference(splits.train if part == "training" else splits.validation, rank, backend)
            raise DataError(
                f"The {part} samples of rank {rank} are not those of rank 0{difference}: all ranks must load the same "
                "data in the same order. Draw from generators with a seed (a --data function is given one if it names "
                "it), and sort the files of a folder."
            )


def _first_difference(source: Source, rank: int, backend: Backend) -> str:
    """Describe how the files of a rank differ from those of rank 0; "" if the source lists no files, or they agree."""
    mine = source.listing() if hasattr(source, "listing") else []

    def of_both(text: str) -> tuple[str, str]:
        texts = gather(backend, text, timeout=None)
        return texts[0], texts[rank]

    counts = tuple(map(int, of_both(str(len(mine)))))
    # Binary search: the first `same` entries agree on both ranks, and at most `most` do.
    same, most = 0, min(counts)
    while same < most:
        middle = (same + most + 1) // 2
        hashes = of_both(hashlib.sha256(os.fsencode("\n".join(mine[:middle]))).hexdigest())
        same, most = (middle, most) if hashes[0] == hashes[1] else (same, middle - 1)
    if same == max(counts):
        return ""
    there, here = of_both(mine[same] if same < len(mine) else "nothing")
    return (
        f" (rank 0 has {counts[0]:,} files, rank {rank} has {counts[1]:,}; the first that differs is {there} on rank 0 "
        f"and {here} on rank {rank})"
    )
