"""Keras' BackupAndRestore: a folder of checkpoints that `fit` resumes from by itself."""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.checkpoint.commit import discard
from hvdtrain.checkpoint.naming import complete
from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Backup:
    """A folder of checkpoints that `fit` resumes from, and removes when finished."""

    folder: str
    every: int | None
    """Steps between checkpoints; None: at the end of every epoch."""
    keep: int
    removed: bool
    """Whether to remove it at the end (`delete_checkpoint`)."""

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint policy of `fit`."""
        return Checkpoint(self.folder, self.every, self.keep)

    def refuse_foreign(self) -> None:
        """Reject a folder saved by Keras' own `fit`; rank 0 only. Raises CheckpointError naming the file."""
        found = Path(self.folder) / "latest.weights.h5"
        if found.exists():
            raise CheckpointError(
                f"BackupAndRestore resumes from hvdtrain's checkpoints. Received: {found}, by Keras' own fit(). Load "
                "it with model.load_weights() and name another backup_dir, or remove it."
            )

    def finish(self) -> None:
        """Remove the checkpoints if requested; rank 0 only. Other files stay."""
        if self.removed:
            for path in complete(Path(self.folder)):
                discard(path)
            with suppress(OSError):  # it is not empty
                Path(self.folder).rmdir()


def without_backup(callbacks: Sequence[Any]) -> tuple[list[Any], Backup | None]:
    """Separate one BackupAndRestore from the other callbacks. Raises ConfigError if it never saves."""
    flat = tf.nest.flatten(list(callbacks))
    backups = [_backup(each) for each in flat if isinstance(each, keras.callbacks.BackupAndRestore)]
    if len(backups) > 1:
        raise ConfigError(f"fit takes one BackupAndRestore. Received: {len(backups)} of them.")
    others = [each for each in flat if not isinstance(each, keras.callbacks.BackupAndRestore)]
    return others, backups[0] if backups else None


def agreed_backup(backup: Backup | None, backend: Backend) -> Backup | None:
    """Return rank 0's backup on every rank; others may have the same one or none. Collective.

    Raises ConfigError if a rank has a different one.
    """
    mine = None if backup is None else asdict(backup)
    everyone = gather(backend, mine)
    first = json.dumps(everyone[0]) if everyone[0] else "none"
    for rank, other in enumerate(everyone):
        if other not in (None, everyone[0]):
            raise ConfigError(
                "BackupAndRestore must be on rank 0, and with the same arguments wherever else it is. Received: "
                f"{json.dumps(other)} on rank {rank} and {first} on rank 0."
            )
    return Backup(**everyone[0]) if everyone[0] else None


def refuse_both(checkpoint: Checkpoint | None, backup: Backup) -> None:
    """Reject two ways of saving. Raises ConfigError naming them."""
    if checkpoint is not None:
        raise ConfigError(
            f"fit saves by BackupAndRestore({backup.folder!r}) or by checkpoint={checkpoint}. Received: both. Leave "
            "out one of them."
        )


def _backup(callback: Any) -> Backup:
    freq = callback.save_freq
    if freq != "epoch" and (isinstance(freq, bool) or freq < 1):
        raise ConfigError(
            f'BackupAndRestore(save_freq=…) is "epoch" or a number of steps, at least 1. Received: {freq!r}.'
        )
    every = None if freq == "epoch" else int(freq)
    keep = 2 if callback.double_checkpoint else 1
    return Backup(str(callback.backup_dir), every, keep, removed=bool(callback.delete_checkpoint))
