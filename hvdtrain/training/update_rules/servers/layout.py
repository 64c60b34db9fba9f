"""Which server owns which variables, and how values travel: one flat array per dtype, and rows of tables alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.gradients.reduction import Gradient

HEADER = np.dtype([("kind", "i8"), ("step", "i8"), ("version", "i8"), ("share", "f8"), ("weight", "f8")])
"""First part of every message.

`step`: the optimizer step, or the era of tickets; `version`: updates that a server has applied to the parameters, or
the era's first ticket; `share`: of the step's samples; `weight`: of this worker's samples.
"""
PUSH, PULL, TICKET, MEET, MET = range(5)
"""Kinds of messages; the last two are between servers: `peers.py`."""


@dataclass(frozen=True)
class Entry:
    """A variable and the form in which it travels."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    sparse: bool
    """Whether its gradient consists of rows."""
    by_rows: bool
    """Whether only rows with a gradient change."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class ServerLayout:
    """The variables of one server, in the order of messages."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = list(entries)
        self.dense = [each for each in entries if not each.sparse]
        """Variables whose gradients travel whole."""
        self.sparse = [each for each in entries if each.sparse]
        """Variables of whose gradients rows travel."""
        self.whole = [each for each in entries if not each.by_rows]
        """Variables whose values travel whole."""
        self.tables = [each for each in entries if each.by_rows]
        """Variables of whose values the changed rows travel."""

    @staticmethod
    def flat_buffers(entries: Sequence[Entry]) -> list[np.ndarray]:
        """Return arrays for the values of `entries`, one per dtype."""
        return [np.empty(sum(e.size for e in group), dtype) for dtype, group in _by_dtype(entries).items()]

    @staticmethod
    def flat(entries: Sequence[Entry], values: Mapping[str, Any]) -> list[tf.Tensor]:
        """Return the values, by path, as one flat tensor per dtype."""
        return [
            tf.concat([tf.reshape(values[e.path], [-1]) for e in group], 0) for group in _by_dtype(entries).values()
        ]

    @staticmethod
    def apart(entries: Sequence[Entry], flats: Sequence[Any]) -> dict[str, tf.Tensor]:
        """Return values by path from the result of `flat`."""
        found: dict[str, tf.Tensor] = {}
        for group, flat in zip(_by_dtype(entries).values(), flats, strict=True):
            parts = tf.split(flat, [e.size for e in group])
            found |= {e.path: tf.reshape(part, e.shape) for e, part in zip(group, parts, strict=True)}
        return found


def _by_dtype(entries: Sequence[Entry]) -> dict[np.dtype, list[Entry]]:
    groups: dict[np.dtype, list[Entry]] = {}
    for each in entries:
        groups.setdefault(each.dtype, []).append(each)
    return groups


def owners_of(sizes: Mapping[str, int], servers: int) -> dict[str, int]:
    """Return each variable's server: the largest first, each to the one with the fewest bytes so far."""
    load = [0] * servers
    owners = {}
    for path in sorted(sizes, key=lambda path: -sizes[path]):
        owner = load.index(min(load))
        owners[path] = owner
        load[owner] += sizes[path]
    return {path: owners[path] for path in sizes}


class Outgoing:
    """A worker's gradients for one server, from the compiled step to the messages."""

    def __init__(self, layout: ServerLayout) -> None:
        self._flats = [tf.Variable(np.zeros_like(flat), trainable=False) for flat in layout.flat_buffers(layout.dense)]
        self._rows = [
            (
                tf.Variable(np.zeros(0, np.int64), shape=[None], trainable=False),
                tf.Variable(np.zeros((0, *e.shape[1:]), e.dtype), shape=[None, *e.shape[1:]], trainable=False),
            )
            for e in layout.sparse
        ]

    def keep(self, layout: ServerLayout, gradients: Mapping[str, Gradient]) -> None:
        """Keep a step's gradients, by path."""
        for kept, flat in zip(self._flats, layout.flat(layout.dense, gradients), strict=True):
            kept.assign(flat)
        for entry, (indices, values) in zip(layout.sparse, self._rows, strict=True):
            indices.assign(tf.cast(gradients[entry.path].indices, tf.int64))
            values.assign(gradients[entry.path].values)

    def read(self) -> list[tf.Tensor]:
        """Return them as tensors, in a compiled function."""
        return [each.read_value() for each in (*self._flats, *(each for pair in self._rows for each in pair))]

    def arrays(self, tensors: Sequence[tf.Tensor]) -> list[np.ndarray]:
        """Return the result of `read` as it travels."""
        arrays = [each.numpy() for each in tensors]
        flats, rows = arrays[: len(self._flats)], arrays[len(self._flats) :]
        counts = [np.array([len(indices) for indices in rows[::2]])] if rows else []
        return [*flats, *counts, *rows]
