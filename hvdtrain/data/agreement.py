"""Check that all ranks loaded the same data: each takes its slice of a batch by sample numbers, so these must agree."""

import hashlib
import os

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source
from hvdtrain.data.splits import DataSplits


def check_same_data(splits: DataSplits, backend: Backend) -> None:
    """Refuse data that differ by rank; every rank calls it.

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
