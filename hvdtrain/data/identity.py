"""Identity of a run's samples, kept in its checkpoints: a resumed run must have the same ones."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source
from hvdtrain.data.splits import DataSplits

Identity = dict[str, dict[str, Any]]
"""Size and fingerprint (hexadecimal) of the training and the validation samples.

The fingerprint is None for a user's own source without one.
"""


def identity_of(splits: DataSplits) -> Identity:
    """Return sizes and fingerprints of `splits`; see `Source.fingerprint`."""
    return {"training": _identity(splits.train), "validation": _identity(splits.validation)}


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


def _count(samples: int | None) -> str:
    return "streamed" if samples is None else f"{samples:,}"


def _identity(source: Source) -> dict[str, Any]:
    known = hasattr(source, "fingerprint")
    return {"samples": source.size, "fingerprint": source.fingerprint().hex() if known else None}
