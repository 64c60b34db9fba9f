"""Samples that cannot be read: found by name, and left out where a few of them are tolerated."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import DataError
from hvdtrain.data.source import Source

EXCHANGE_TIMEOUT_S = 600.0
Exchange = Callable[[bytes], list[bytes]]


class BadRecords:
    """The samples of `source` that were found to be bad.

    Args:
        source: the samples.
        limit: how many may be bad, over all ranks, before that is an error.
        exchange: gives every rank's bytes to all; None where there is one rank.
    """

    def __init__(self, source: Source, limit: int = 0, exchange: Exchange | None = None) -> None:
        self.limit = limit
        self.found: dict[int, str] = {}
        """What is wrong, by number of the sample."""
        self._source = source
        self._exchange = exchange
        self._avoided: frozenset[int] = frozenset()
        """The samples that are left out where samples are read now: those that were known when that was built."""

    @property
    def tolerated(self) -> bool:
        """Whether bad samples may be left out at all."""
        return self.limit > 0

    def examine(self, numbers: Any, error: Exception) -> None:
        """Find out which of the samples `numbers`, whose reading failed with `error`, are bad.

        Those that were left out are not looked at again, but what was read in their place is.

        Raises:
            DataError: naming file and record, if it is one too many.
            Exception: `error`, if each of them can be read alone.
        """
        read = dict.fromkeys(int(n) if int(n) not in self._avoided else self._stand_in() for n in np.asarray(numbers))
        bad = {number: text for number in read if (text := self._trouble(number))}
        if not bad:
            raise error
        self.found |= bad
        self._refuse_too_many(next(iter(bad.values())))

    def recall(self, found: Mapping[str, str]) -> None:
        """Leave out what a run found before it was stopped, where bad samples are tolerated.

        Args:
            found: what is wrong, by number of the sample.

        Raises:
            DataError: it is too many.
        """
        if self.tolerated and found:
            self.found |= {int(number): text for number, text in found.items()}
            self._refuse_too_many(next(iter(found.values())))

    def share(self) -> None:
        """Tell all ranks what was found on each, where that is tolerated; every rank calls it.

        Raises:
            DataError: together it is too many.
        """
        if not self.tolerated or self._exchange is None:
            return
        for theirs in self._exchange(json.dumps(self.found).encode()):
            self.found |= {int(number): text for number, text in json.loads(theirs).items()}
        if self.found:
            self._refuse_too_many(next(iter(self.found.values())))

    def left_out(self, numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return numbers [n] that can be read, and weights [n]: 0 for those that stand in for a bad sample."""
        self._avoided = frozenset(self.found)
        bad = tf.constant(sorted(self._avoided), tf.int64)
        good = ~tf.reduce_any(numbers[:, tf.newaxis] == bad, axis=1)
        return tf.where(good, numbers, self._stand_in()), tf.cast(good, tf.float32)

    def _stand_in(self) -> int:
        """Return the number of the sample that is read in the place of those that are left out."""
        return next(number for number in range(self._source.size) if number not in self._avoided)

    def _refuse_too_many(self, example: str) -> None:
        if not self.tolerated:
            raise DataError(f"{example}. --on-bad-record skip:N leaves out up to N such samples.")
        if len(self.found) > self.limit or len(self.found) == self._source.size:
            raise DataError(
                f"{example}. {len(self.found)} samples of {self._source.name} are bad, more than --on-bad-record "
                f"skip:{self.limit} tolerates."
            )

    def _trouble(self, number: int) -> str:
        """Return what is wrong with one sample, with its place; "" if it can be read."""
        try:
            self._source.gather(tf.constant([number], tf.int64))
        except (tf.errors.OpError, ValueError) as error:
            place, cause = self._source.describe(number), cause_of(error)
            return cause if place in cause else f"{place}: {cause}"
        return ""


def with_weights(elements: tuple[Any, ...], weights: tf.Tensor) -> tuple[Any, ...]:
    """Multiply the samples' weights by `weights` [n]."""
    inputs, targets, *own = elements
    return inputs, targets, weights * tf.cast(own[0], tf.float32) if own else weights


def cause_of(error: Exception) -> str:
    """Return the sentence of an error that says what is wrong, without what TensorFlow puts around it."""
    text = str(getattr(error, "message", error))
    ours = re.search(r"DataError: (.*)", text)
    if ours:
        return ours.group(1).strip().removesuffix(".")
    lines = [line for line in text.splitlines() if line.strip()]
    line = lines[-1] if lines[0].startswith("in user code") else lines[0]
    line = re.sub(r"\{\{[^}]*\}\}|^\s*[\w.]+Error: ", "", line)
    return re.sub(r"\s*\[Op:\w+\].*", "", line).strip().removesuffix(".")
