"""Which checkpoints stay when a new one has been written."""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.checkpoint.commit import discard
from hvdtrain.checkpoint.drafts import clear_leavings
from hvdtrain.checkpoint.manifest import saved_at
from hvdtrain.checkpoint.naming import complete
from hvdtrain.config.errors import CheckpointError

_HOUR_S = 3600.0


@dataclass(frozen=True)
class Retention:
    """What stays besides the best checkpoint."""

    keep: int | None = 3
    """How many of the newest; None: all."""
    every_hours: float | None = None
    """The first checkpoint, and then each that is at least so many hours younger than the last one of these."""

    def superfluous(self, checkpoints: Sequence[Path]) -> list[Path]:
        """Return those of `checkpoints`, the newest last, that neither rule keeps."""
        if self.keep is None:
            return []
        hourly = self._hourly(checkpoints)
        return [path for path in checkpoints[: -self.keep] if path not in hourly]

    def _hourly(self, checkpoints: Sequence[Path]) -> list[Path]:
        if self.every_hours is None:
            return []
        kept: list[Path] = []
        last = float("-inf")
        for path in checkpoints:
            try:
                saved = saved_at(path)
            except CheckpointError:
                continue
            if saved - last >= self.every_hours * _HOUR_S:
                kept.append(path)
                last = saved
        return kept


def remove_old(folder: Path, spared: Collection[Path], retention: Retention) -> None:
    """Remove what `retention` does not keep and what killed writers have left, but none that is `spared`."""
    for path in retention.superfluous(complete(folder)):
        if path not in spared:
            with contextlib.suppress(OSError):
                discard(path)
    clear_leavings(folder)
