"""Some samples of a source, such as those that are held out for validation."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source

ONE_OF = 10
"""One of so many samples is held out where nobody says how many."""
HOLD_OUT_SEED = 20260101
"""Which samples are held out must not depend on a run's seed: what it validates on must never have been trained on."""


class Subset:
    """The samples `numbers` of `source`, in that order; see `Source`.

    Raises:
        DataError: there are none.
    """

    def __init__(self, source: Source, numbers: np.ndarray, name: str) -> None:
        if not len(numbers):
            raise DataError(f"{name} holds no samples.")
        self.name = name
        self.size = len(numbers)
        self.spec = source.spec
        self.finite = source.finite
        self.heavy = source.heavy
        self._source = source
        self._numbers = np.asarray(numbers, np.int64)
        whole = getattr(source, "file_of", None)
        self.file_of = None if whole is None else whole[self._numbers]
        """[samples] the number of each sample's file, where they are in files."""

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """See `Source`."""
        return self._source.gather(tf.gather(self._numbers, numbers))

    def describe(self, number: int) -> str:
        """See `Source`."""
        return self._source.describe(int(self._numbers[number]))

    def fingerprint(self) -> bytes:
        """See `Source`."""
        return hashlib.sha256(self._source.fingerprint() + self._numbers.tobytes()).digest()

    def listing(self) -> list[str]:
        """Return the files of the source that this is a part of; none where it lists none."""
        return self._source.listing() if hasattr(self._source, "listing") else []

    def version(self) -> bytes:
        """Return what differs when the source's files have been changed; nothing where it has no such word."""
        return self._source.version() if hasattr(self._source, "version") else b""


def hold_out(source: Source, count: int, labels: np.ndarray | None = None) -> tuple[Subset, Subset]:
    """Split `source` into training and validation samples, always in the same way.

    Args:
        source: what is split.
        count: samples for validation; 0: one of ten.
        labels: [samples] labels, of which each part gets its share; None: drawn from all alike.

    Raises:
        DataError: nothing would be left of one part.
    """
    count = count or max(1, source.size // ONE_OF)
    if not 0 < count < source.size:
        raise DataError(
            f"Of the {source.size} samples of {source.name}, {count} cannot be held out for validation. "
            "See --data-args validation."
        )
    order = np.random.default_rng(HOLD_OUT_SEED).permutation(source.size)
    if labels is not None:
        order = _evenly(order, labels)
    held = np.sort(order[:count])
    kept = np.setdiff1d(np.arange(source.size), held)
    return Subset(source, kept, f"{source.name} (training)"), Subset(source, held, f"{source.name} (validation)")


def _evenly(order: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Reorder so that any first part holds each label's share, within one sample."""
    labels = np.asarray(labels)[order]
    rank = np.empty(len(order))
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return order[np.argsort(rank, kind="stable")]
