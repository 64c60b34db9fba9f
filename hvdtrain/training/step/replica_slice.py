"""A replica's part of what its process has read."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch, slice_bounds, slice_bounds_of_tensor


def replica_slice(batch: Batch, backend: Backend) -> Batch:
    """Return this replica's part of `batch`, within what `Backend.run` calls.

    Where each process has one replica it is the whole of what was read. A process that holds all replicas reads global
    batches, which are cut as they are between processes.
    """
    if backend.local_size == 1:
        return batch
    total = batch.global_samples
    if tf.is_tensor(total):
        first, last, has_samples = slice_bounds_of_tensor(tf.cast(total, tf.int64), backend.index, backend.size)
    else:
        first, last, has_samples = slice_bounds(int(total), backend.index, backend.size)

    def cut(tensor: Any) -> Any:
        return None if tensor is None else tensor[first:last]

    inputs, targets, weights = tf.nest.map_structure(cut, (batch.inputs, batch.targets, batch.sample_weight))
    return batch._replace(inputs=inputs, targets=targets, sample_weight=weights, has_samples=has_samples)
