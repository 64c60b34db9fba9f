"""The exchange of sparse gradients: rows gathered, or the table made dense, whichever moves fewer bytes."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives

SMALL_TABLE_BYTES = 64 * 1024
"""Tables up to here travel dense: one message of this size costs what two small ones do (BASELINES: 64 KB and 1 KB
take the same time over MPI and over Gloo)."""


def sum_duplicates(slices: tf.IndexedSlices) -> tf.IndexedSlices:
    """Add up the rows of `slices` that share an index.

    Keras' adaptive optimizers apply each occurrence of an index as an update of its own, which is
    not the gradient of the sum.
    """
    indices, position = tf.unique(slices.indices)
    values = tf.math.unsorted_segment_sum(slices.values, position, tf.size(indices))
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def is_small(slices: tf.IndexedSlices) -> bool:
    """Return whether the table is too small to ask how many of its rows were touched."""
    size = table_bytes(slices)
    return size is not None and size <= SMALL_TABLE_BYTES


def table_bytes(slices: tf.IndexedSlices | tf.Tensor) -> int | None:
    """Return the bytes of a whole table or tensor, the same on every replica; None where its shape is not static."""
    count = slices.shape.num_elements()
    return None if count is None else int(count) * int(slices.dtype.size)


class JoinedRows:
    """The rows of several tables of one dtype and row shape in one tensor, each row once.

    An exchange of each table by itself would take as many messages, whose rows are few.
    """

    def __init__(self, tables: Sequence[tf.IndexedSlices]) -> None:
        self._tables = tables
        numbers = [tf.cast(s.indices, tf.int64) + (_SPAN * i + _SPAN // 2) for i, s in enumerate(tables)]
        self._rows = sum_duplicates(tf.IndexedSlices(tf.concat([s.values for s in tables], 0), tf.concat(numbers, 0)))

    def __len__(self) -> int:
        return len(self._tables)

    def counts(self) -> tf.Tensor:
        """Return how many rows of each table this replica touched, float32 [tables]."""
        tables = _table_of(self._rows)
        return tf.math.unsorted_segment_sum(tf.ones_like(tables, tf.float32), tables, len(self))

    def gathering_is_cheaper(self, counts: tf.Tensor) -> tf.Tensor:
        """Return for each table whether gathering rows moves fewer bytes than reducing it, bool [tables].

        Of n replicas each receives (n - 1) / n of all rows with their numbers when they are gathered, and twice
        (n - 1) / n of the table when it is reduced in a ring (Patarasuk and Yuan 2009).

        Args:
            counts: how many rows of each table all replicas touched, added up; the same on all of them.
        """
        values = self._rows.values
        row_bytes = tf.cast(tf.reduce_prod(tf.shape(values)[1:]), tf.float32) * float(values.dtype.size)
        whole_bytes = tf.stack([_whole_bytes(each) for each in self._tables])
        return counts * (row_bytes + float(tf.int64.size)) < 2.0 * whole_bytes

    def gather(
        self, exchange: Collectives, name: str, *, factor: float = 1.0, chosen: tf.Tensor | None = None
    ) -> list[tf.IndexedSlices]:
        """Return for each table the rows that all replicas touched, those of one index added up. Collective.

        Args:
            exchange: the replicas.
            name: tells this exchange from every other.
            factor: multiplies the sums.
            chosen: the tables, bool [tables], whose rows are sent; all if None. The others have no rows.
        """
        values, numbers = self._rows.values, self._rows.indices
        if chosen is not None:
            sent = tf.gather(chosen, _table_of(self._rows))
            values, numbers = tf.boolean_mask(values, sent), tf.boolean_mask(numbers, sent)
        values = exchange.all_gather(values, name=f"{name}/values")
        numbers = exchange.all_gather(numbers, name=f"{name}/indices")
        rows = sum_duplicates(tf.IndexedSlices(values, numbers))
        # A Python number, which becomes one of the values' dtype: tf.cast would take it through float32.
        return self._by_table(rows if factor == 1.0 else tf.IndexedSlices(rows.values * factor, rows.indices))

    def none(self) -> list[tf.IndexedSlices]:
        """Return no row of each table."""
        return [tf.IndexedSlices(s.values[:0], s.indices[:0], s.dense_shape) for s in self._tables]

    def _by_table(self, rows: tf.IndexedSlices) -> list[tf.IndexedSlices]:
        tables = _table_of(rows)
        values = tf.dynamic_partition(rows.values, tables, len(self))
        numbers = tf.dynamic_partition(rows.indices % _SPAN - _SPAN // 2, tables, len(self))
        return [
            tf.IndexedSlices(values[i], tf.cast(numbers[i], s.indices.dtype), s.dense_shape)
            for i, s in enumerate(self._tables)
        ]


_SPAN = 2**40
"""Row k of table i is number i * _SPAN + _SPAN / 2 + k among joined rows: numbers out of a table, which optimizers on
a GPU pass over, stay out of it."""


def _table_of(rows: tf.IndexedSlices) -> tf.Tensor:
    return tf.cast(rows.indices // _SPAN, tf.int32)


def _whole_bytes(slices: tf.IndexedSlices) -> Any:
    known = table_bytes(slices)
    if known is not None:
        return float(known)
    return tf.cast(tf.reduce_prod(slices.dense_shape), tf.float32) * float(slices.dtype.size)


def gather_rows(slices: tf.IndexedSlices, exchange: Collectives, name: str) -> tf.IndexedSlices:
    """Return the rows that all replicas touched, those of one index added up."""
    return JoinedRows([slices]).gather(exchange, name)[0]


def as_rows(table: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return a dense table as all of its rows."""
    indices = tf.range(tf.shape(table, out_type=like.indices.dtype)[0], dtype=like.indices.dtype)
    return tf.IndexedSlices(table, indices, like.dense_shape)
