"""A replica's part of what its process has read."""

from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch, slice_bounds, slice_bounds_of_tensor
from hvdtrain.runtime.guarded import guarded


def replica_slice(batch: Batch, backend: Backend) -> Batch:
    """Return this replica's part of `batch`, within what `Backend.run` calls.

    Where each process has one replica it is the whole of what was read. A process that holds all replicas reads global
    batches, which are cut as they are between processes.
    """
    if backend.local_size == 1:
        return _computed(batch)
    total = batch.global_samples
    if tf.is_tensor(total):
        first, last, has_samples = slice_bounds_of_tensor(tf.cast(total, tf.int64), backend.index, backend.size)
    else:
        first, last, has_samples = slice_bounds(int(total), backend.index, backend.size)

    def cut(tensor: Any) -> Any:
        return None if tensor is None else tensor[first:last]

    inputs, targets, weights = tf.nest.map_structure(cut, (batch.inputs, batch.targets, batch.sample_weight))
    return batch._replace(inputs=inputs, targets=targets, sample_weight=weights, has_samples=has_samples)


def _computed(batch: Batch) -> Batch:
    """Return `batch`; that it is a placeholder is not known before the step runs.

    From a constant TensorFlow would conclude that nothing comes of this replica's passes, and leave out what they send
    to the experts and tables of other ranks, who would wait for it for ever.
    """
    if tf.is_tensor(batch.has_samples) or batch.has_samples:
        return batch
    return batch._replace(has_samples=guarded(tf.constant(batch.has_samples)))
