"""A replica's part of what its process has read, cut into the microbatches of gradient accumulation."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, opt
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
    to the experts and tables of other ranks, who would wait for it forever.
    """
    if tf.is_tensor(batch.has_samples) or batch.has_samples:
        return batch
    return batch._replace(has_samples=guarded(tf.constant(batch.has_samples)))


def per_microbatch(batch: int, replicas: int, accumulate: int, *, uneven: bool = False) -> int:
    """Return the samples of a microbatch: `batch` / `replicas` / `accumulate`.

    Args:
        batch: samples of the global batch.
        replicas: their number.
        accumulate: number of microbatches.
        uneven: whether it need not divide: what is returned is then the largest number of samples.

    Raises:
        ConfigError: it does not divide.
    """
    if accumulate < 1:
        raise ConfigError(f"{opt('accumulate')} must be at least 1. Received: {accumulate}.")
    if uneven:
        return -(-batch // (replicas * accumulate))
    mine = batch // replicas
    if mine % accumulate:
        unit = replicas * accumulate
        near = max(1, batch // unit) * unit
        raise ConfigError(
            f"The {mine} samples that a rank takes of a batch of {batch} do not divide into {accumulate} microbatches. "
            f"Use {opt('batch', near)} or {opt('batch', near + unit)}, or another {opt('accumulate')}."
        )
    return mine // accumulate


class Microbatches:
    """A replica's batch as microbatches of `length` samples, equally many on every replica.

    Args:
        batch: what this replica takes of the global batch.
        replicas: number of replicas.
        length: samples of a microbatch; the last one may be shorter.
    """

    def __init__(self, batch: Batch, replicas: int, length: int) -> None:
        largest = -(-batch.global_samples // replicas)
        self.count = -(-largest // length)
        """Follows from the largest part of the global batch; an int where its size is known before compilation."""
        self._batch = batch
        self._length = length
        self._tensors = (batch.inputs, batch.targets, batch.sample_weight)
        self._first = tf.nest.flatten(self._tensors)[0]
        self._even = not tf.is_tensor(self.count) and self._first.shape[0] == self.count * length

    @property
    def single(self) -> bool:
        """Whether it is known that there is but one."""
        return not tf.is_tensor(self.count) and self.count == 1

    def take(self, number: Any) -> Batch:
        """Return microbatch `number`, an int or an integer tensor.

        One that has no samples on this replica holds a neighbour's and does not count it. That it does not is not
        known before the step runs: from a constant TensorFlow would leave out what others wait for.
        """
        begin = number * self._length
        if self._even and (tf.is_tensor(number) or number < self.count):
            return self._part(lambda t: tf.ensure_shape(t[begin : begin + self._length], [self._length, *t.shape[1:]]))
        samples = tf.shape(self._first)[0]
        has_samples = tf.cast(self._batch.has_samples, tf.float32) * tf.cast(begin < samples, tf.float32)
        begin = tf.minimum(begin, samples - 1)
        end = tf.maximum(tf.minimum(begin + self._length, samples), begin + 1)
        return self._part(lambda t: t[begin:end])._replace(has_samples=guarded(has_samples))

    def _part(self, cut: Callable[[tf.Tensor], tf.Tensor]) -> Batch:
        inputs, targets, weights = tf.nest.map_structure(lambda t: None if t is None else cut(t), self._tensors)
        return self._batch._replace(inputs=inputs, targets=targets, sample_weight=weights)
