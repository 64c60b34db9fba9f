"""Whether all ranks hold the same data: each takes its part of every batch, so all must number them alike."""

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import DataError
from hvdtrain.data.splits import DataSplits

TIMEOUT_S = 600.0


def check_same_data(splits: DataSplits, backend: Backend) -> None:
    """Refuse data that differ by rank; every rank calls it.

    Raises:
        DataError: naming a rank that differs, and which samples do.
    """
    if backend.size == 1:
        return
    mine = [source.fingerprint() for source in (splits.train, splits.validation)]
    gathered = backend.gather_bytes(b"".join(mine), timeout=TIMEOUT_S)
    for rank, other in enumerate(gathered):
        if other != gathered[0]:
            part = "training" if other[:32] != gathered[0][:32] else "validation"
            raise DataError(
                f"The {part} samples of rank {rank} are not those of rank 0: all ranks must load the same data in the "
                "same order. Draw from generators with a seed (a --data function is given one if it names it), and "
                "sort the files of a folder."
            )
