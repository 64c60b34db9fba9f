"""What tells the samples of a run from others: its checkpoints hold it, and it goes on with the same ones only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source
from hvdtrain.data.splits import DataSplits

Identity = dict[str, dict[str, Any]]
"""Number of samples and fingerprint, as a hexadecimal number, of the training and the validation samples.

A source of a user's own may have no fingerprint: None.
"""


def identity_of(splits: DataSplits) -> Identity:
    """Return what tells `splits` from others, as far as fingerprints do; see `Source.fingerprint`."""
    return {"training": _identity(splits.train), "validation": _identity(splits.validation)}


def check_same_samples(before: Mapping[str, Any], now: Identity, run: Path) -> None:
    """Refuse to go on with the run in the folder `run` on other samples than `before`.

    Raises:
        DataError: naming the part that differs, and its numbers of samples.
    """
    for part, mine in now.items():
        theirs = before[part]
        if mine != theirs:
            then, today = theirs["samples"], mine["samples"]
            told = f"{today:,} now and {then:,} before" if today != then else f"{today:,} now and before, but others"
            raise DataError(
                f"--resume {run}: the {part} samples are not those that the run was trained with ({told}): "
                "their order, and those that are held out, would be others. Give it the data as they were, or start a "
                "new run."
            )


def _identity(source: Source) -> dict[str, Any]:
    known = hasattr(source, "fingerprint")
    return {"samples": source.size, "fingerprint": source.fingerprint().hex() if known else None}
