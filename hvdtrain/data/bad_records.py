"""Samples that cannot be read: located and named, and skipped where a few are tolerated."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source

Gather = Callable[[Any], list[Any]]


class BadRecords:
    """The unreadable samples of `source` found so far, over all ranks.

    Args:
        source: the samples.
        limit: how many are tolerated, over all ranks.
        gather: gathers every rank's value, of JSON types; None with one rank.
    """

    def __init__(self, source: Source, limit: int = 0, gather: Gather | None = None) -> None:
        self.limit = limit
        self.found: dict[int, str] = {}
        """Cause of each bad sample, by its number."""
        self._source = source
        self._gather = gather
        self._avoided: frozenset[int] = frozenset()
        """Bad samples that the current dataset skips."""

    @property
    def tolerated(self) -> bool:
        """Whether bad samples may be skipped at all."""
        return self.limit > 0

    def examine(self, numbers: Any, error: Exception) -> None:
        """Locate the bad samples of a batch whose reading failed with `error`.

        Samples skipped already are not read again, but their stand-in is.

        Raises:
            DataError: more than `limit` are bad; names file and record.
            Exception: `error` itself, if every sample can be read on its own.
        """
        read = dict.fromkeys(int(n) if int(n) not in self._avoided else self._stand_in() for n in np.asarray(numbers))
        bad = {number: text for number in read if (text := self._trouble(number))}
        if not bad:
            raise error
        self.found |= bad
        self._refuse_too_many(next(iter(bad.values())))

    def recall(self, found: Mapping[str, str]) -> None:
        """Skip samples that a resumed run had found bad, if bad samples are tolerated.

        Args:
            found: cause by number.

        Raises:
            DataError: more than `limit`.
        """
        if self.tolerated and found:
            self.found |= {int(number): text for number, text in found.items()}
            self._refuse_too_many(next(iter(found.values())))

    def share(self) -> None:
        """Merge the bad samples found by all ranks, if any are tolerated. Collective.

        Raises:
            DataError: together they are more than `limit`.
        """
        if not self.tolerated or self._gather is None:
            return
        for theirs in self._gather(self.found):
            self.found |= {int(number): text for number, text in theirs.items()}
        if self.found:
            self._refuse_too_many(next(iter(self.found.values())))

    def left_out(self, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return readable sample numbers [n], and weights [n]: 0 where one stands in for a bad sample."""
        self._avoided = frozenset(self.found)
        bad = tf.constant(sorted(self._avoided), tf.int64)
        good = ~tf.reduce_any(numbers[:, tf.newaxis] == bad, axis=1)
        return tf.where(good, numbers, self._stand_in()), tf.cast(good, tf.float32)

    def _stand_in(self) -> int:
        """Return the sample that is read in place of a bad one."""
        return next(number for number in range(self._source.size) if number not in self._avoided)

    def _refuse_too_many(self, example: str) -> None:
        if not self.tolerated:
            raise DataError(f"{example}. --on-bad-record skip:N leaves out up to N such samples.")
        if len(self.found) > self.limit or len(self.found) == self._source.size:
            raise DataError(
                f"{example}. {len(self.found)} samples of {self._source.name} are bad, more than "
                f"--on-bad-record skip:{self.limit} tolerates."
            )

    def _trouble(self, number: int) -> str:
        """Return location and cause if a sample cannot be read, else ""."""
        try:
            self._source.gather(tf.constant([number], tf.int64))
        except (tf.errors.OpError, ValueError) as error:
            place, cause = self._source.describe(number), cause_of(error)
            return cause if place in cause else f"{place}: {cause}"
        return ""


def with_weights(elements: tuple[Any, ...], weights: tf.Tensor) -> tuple[Any, ...]:
    """Multiply the sample weights by `weights` [n]."""
    inputs, targets, *own = elements
    return inputs, targets, weights * tf.cast(own[0], tf.float32) if own else weights


def cause_of(error: Exception) -> str:
    """Return the cause in an error's message, without TensorFlow's decoration."""
    text = str(getattr(error, "message", error))
    ours = re.search(r"DataError: (.*)", text)
    if ours:
        return ours.group(1).strip().removesuffix(".")
    lines = [line for line in text.splitlines() if line.strip()]
    line = lines[-1] if lines[0].startswith("in user code") else lines[0]
    line = re.sub(r"\{\{[^}]*\}\}|^\s*[\w.]+Error: ", "", line)
    return re.sub(r"\s*\[Op:\w+\].*", "", line).strip().removesuffix(".")
