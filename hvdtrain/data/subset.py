"""Subsets of a source, such as held-out validation samples."""

import hashlib
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source

ONE_OF = 10
"""By default, one in so many samples is held out."""
HOLD_OUT_SEED = 20260101
"""Fixed, not the run's seed: a resumed run must never validate on samples that it trained on."""


class Subset:
    """The samples `numbers` of `source`, in that order; see `Source`.

    Raises:
        DataError: `numbers` is empty.
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
        """Return the file listing of the whole source; empty if it has none."""
        return self._source.listing() if hasattr(self._source, "listing") else []

    def version(self) -> bytes:
        """Return the version of the source's files; empty if it has none."""
        return self._source.version() if hasattr(self._source, "version") else b""


def hold_out(source: Source, count: int, labels: np.ndarray | None = None) -> tuple[Subset, Subset]:
    """Split `source` into training and validation samples, deterministically.

    Args:
        source: the samples to split.
        count: samples for validation; 0: one of ten.
        labels: [samples] labels to stratify by; None: no stratification.

    Raises:
        DataError: one of the two would be empty.
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
    """Reorder so that every prefix is stratified by label, within one sample."""
    labels = np.asarray(labels)[order]
    rank = np.empty(len(order))
    for label in np.unique(labels):
        mine = np.flatnonzero(labels == label)
        rank[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return order[np.argsort(rank, kind="stable")]
