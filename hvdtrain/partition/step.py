"""The partition of a batch of which this rank has rows."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Collectives
from hvdtrain.partition.partition import Partition, unfolded


def open_rows(tensor: tf.Tensor) -> tf.Tensor:
    """Return a tensor whose number of rows is not known while the step is traced, as it is not that of the batch."""
    return tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=[None, *tensor.shape[1:]])


def partition_of(
    collectives: Collectives, tensor: tf.Tensor, *, has_samples: Any = 1.0, total: Any = None
) -> Partition:
    """Return the partition of a batch of which this rank has the rows of `tensor`, while a step is traced.

    Args:
        collectives: the ranks with different samples.
        tensor: [samples, …], with rows that are not known: see `open_rows`.
        has_samples: 1, or 0 where the rows are a placeholder.
        total: samples of the batch, if they are split as by `split_bounds`; None: ranks tell one another.
    """
    rows = tf.cast(tf.cast(tf.shape(tensor)[0], tf.float32) * tf.cast(has_samples, tf.float32), tf.int32)
    index = collectives.index
    if total is None:
        counts = collectives.all_gather(tf.expand_dims(rows, 0), name="whole_batch/rows")
        begin, total = tf.reduce_sum(counts[:index]), tf.reduce_sum(counts)
    else:
        size = collectives.size
        begin = tf.cast(tf.cast(total, tf.int64) * index // size, tf.int32)
    return Partition(collectives, rows=rows, begin=begin, total=total, first=unfolded(index == 0))


def whole_nest(partition: Partition, nest: Any) -> Any:
    """Return true values of the tensors of a nest."""
    return tf.nest.map_structure(
        lambda each: partition.whole(each) if isinstance(each, tf.Tensor) else each, nest, expand_composites=True
    )
