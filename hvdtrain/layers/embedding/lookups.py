"""Rows of tables that other ranks hold: numbers of rows go to their holders, and the rows come back.

One exchange there and one back for all tables together, of as many rows as each rank needs of each other; gradients
take the way back to the holder, which adds up those of one row.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from hvdtrain.layers.embedding.partition import Partition


class RowExchange(Protocol):
    """The ranks that have divided the tables among them."""

    size: int
    index: int

    def exchange_rows(self, tensor: tf.Tensor, rows: tf.Tensor, *, name: str) -> tuple[tf.Tensor, tf.Tensor]:
        """Send `rows[i]` consecutive rows to rank i; return what came, by rank, and how many rows of each."""


class Table(NamedTuple):
    """A table and this rank's part of it."""

    partition: Partition
    part: Any
    """[own rows, own columns], a tf.Variable."""


class Addresses(NamedTuple):
    """Where the rows that a rank looks up lie: the parts of a rank's tables count as one long table."""

    holders: tf.Tensor
    """[lookups], int32: the rank that holds each row."""
    places: tf.Tensor
    """[lookups], int64: its number among all rows of that rank."""


def addresses(tables: Sequence[Partition], rows: Sequence[tf.Tensor]) -> Addresses:
    """Return where rows lie.

    Args:
        tables: their partitions, by table or by row.
        rows: numbers of rows of each table, int64 vectors.
    """
    firsts = np.stack([table.first_rows() for table in tables])  # [tables, ranks]
    begins = begins_of(tables)
    holders = [
        tf.searchsorted(tf.constant(first, tf.int64), numbers, side="right") - 1
        for first, numbers in zip(firsts, rows, strict=True)
    ]
    places = [
        numbers + tf.gather(tf.constant(begin - first, tf.int64), holder)
        for begin, first, numbers, holder in zip(begins, firsts, rows, holders, strict=True)
    ]
    return Addresses(tf.concat(holders, 0), tf.concat(places, 0))


def begins_of(tables: Sequence[Partition]) -> np.ndarray:
    """Return where each table begins among the rows that a rank holds of all of them: [tables, ranks]."""
    counts = np.stack([table.counts() for table in tables])
    return np.cumsum(counts, axis=0) - counts


def look_up(tables: Sequence[Table], rows: Sequence[tf.Tensor], ranks: RowExchange, *, name: str) -> list[tf.Tensor]:
    """Return the rows [lookups, dim] of each table, by table or by row.

    Args:
        tables: of one dim and one kind of partition, in the same order on every rank.
        rows: numbers of rows of each, int64 vectors of any length.
        ranks: those that hold the tables.
        name: tells this exchange from every other one in a step.
    """
    partitions = [table.partition for table in tables]
    holders, places = addresses(partitions, rows)
    order = tf.argsort(holders, stable=True)
    counts = tf.math.bincount(holders, minlength=ranks.size, maxlength=ranks.size)
    wanted, wanted_by = ranks.exchange_rows(tf.gather(places, order), counts, name=f"{name}/rows")
    found = _own_rows(tables, wanted, begins_of(partitions)[:, ranks.index])
    came = send_rows(found, wanted_by, counts, ranks, name=f"{name}/vectors")
    in_order = tf.gather(came, tf.math.invert_permutation(order))
    return tf.split(in_order, [tf.shape(numbers)[0] for numbers in rows], num=len(rows))


def look_up_columns(
    tables: Sequence[Table], rows: Sequence[tf.Tensor], ranks: RowExchange, *, name: str
) -> list[tf.Tensor]:
    """Do what `look_up` does for tables by column: every rank holds a part of every row."""
    firsts = np.cumsum([0, *(table.partition.rows for table in tables[:-1])])
    mine = tf.concat([numbers + first for numbers, first in zip(rows, firsts, strict=True)], 0)
    counts = tf.fill([ranks.size], tf.shape(mine)[0])
    wanted, wanted_by = ranks.exchange_rows(tf.tile(mine, [ranks.size]), counts, name=f"{name}/rows")
    came = send_rows(_own_rows(tables, wanted, firsts), wanted_by, counts, ranks, name=f"{name}/vectors")
    parts = tf.reshape(came, [ranks.size, -1, came.shape[1]])
    whole = tf.reshape(tf.transpose(parts, [1, 0, 2]), [-1, ranks.size * came.shape[1]])
    return tf.split(whole, [tf.shape(numbers)[0] for numbers in rows], num=len(rows))


def _own_rows(tables: Sequence[Table], places: tf.Tensor, begins: np.ndarray) -> tf.Tensor:
    """Return rows of this rank's parts, [lookups, columns], by their numbers among those of all of its tables."""
    if len(tables) == 1:
        return tf.gather(tables[0].part, places)
    table = tf.searchsorted(tf.constant(begins, tf.int64), places, side="right") - 1
    numbers = tf.dynamic_partition(places - tf.gather(tf.constant(begins, tf.int64), table), table, len(tables))
    back = tf.dynamic_partition(tf.range(tf.shape(places)[0]), table, len(tables))
    found = [tf.gather(each.part, rows) for each, rows in zip(tables, numbers, strict=True)]
    # Of no lookups at all dynamic_stitch would return a vector of another shape.
    return tf.gather(tf.concat(found, 0), tf.math.invert_permutation(tf.concat(back, 0)))


def send_rows(x: tf.Tensor, rows: tf.Tensor, back: tf.Tensor, ranks: RowExchange, *, name: str) -> tf.Tensor:
    """Send `rows[i]` consecutive rows of `x` to rank i; gradients come back the same way.

    Args:
        x: [rows, width].
        rows: how many go to each rank.
        back: how many come from each.
        ranks: whom they go to.
        name: of the exchange.
    """

    @tf.custom_gradient
    def sent(value: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        def gradient(dy: tf.Tensor) -> tf.Tensor:
            return ranks.exchange_rows(dy, back, name=f"{name}/back")[0]

        return ranks.exchange_rows(value, rows, name=name)[0], gradient

    return sent(x)
