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


def gathering_is_cheaper(slices: Sequence[tf.IndexedSlices], exchange: Collectives, name: str) -> list[tf.Tensor]:
    """Return for each table whether gathering rows moves fewer bytes than reducing it; the same on all replicas.

    Of n replicas each receives (n - 1) / n of all rows with their indices when they are gathered, and twice
    (n - 1) / n of the table when it is reduced in a ring (Patarasuk and Yuan 2009). How many rows the others touched
    is not known: their number is added up over the replicas, in one small message for all tables.
    """
    counts = tf.stack([tf.cast(tf.size(s.indices), tf.float32) for s in slices])
    rows = tf.unstack(exchange.all_reduce(counts, name=name), num=len(slices))
    return [rows[i] * _row_bytes(s) < 2.0 * _whole_bytes(s) for i, s in enumerate(slices)]


def _row_bytes(slices: tf.IndexedSlices) -> Any:
    elements = tf.cast(tf.reduce_prod(tf.shape(slices.values)[1:]), tf.float32)
    return elements * float(slices.values.dtype.size) + float(slices.indices.dtype.size)


def _whole_bytes(slices: tf.IndexedSlices) -> Any:
    known = table_bytes(slices)
    if known is not None:
        return float(known)
    return tf.cast(tf.reduce_prod(slices.dense_shape), tf.float32) * float(slices.dtype.size)


def gather_rows(slices: tf.IndexedSlices, exchange: Collectives, name: str) -> tf.IndexedSlices:
    """Return the rows that all replicas touched, those of one index added up."""
    values = exchange.all_gather(slices.values, name=f"{name}/values")
    indices = exchange.all_gather(slices.indices, name=f"{name}/indices")
    return sum_duplicates(tf.IndexedSlices(values, indices, slices.dense_shape))


def as_rows(table: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    """Return a dense table as all of its rows."""
    indices = tf.range(tf.shape(table, out_type=like.indices.dtype)[0], dtype=like.indices.dtype)
    return tf.IndexedSlices(table, indices, like.dense_shape)
