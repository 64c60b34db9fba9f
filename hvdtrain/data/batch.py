"""A replica's part of one global batch, and the arithmetic of cutting it."""

from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.config.errors import ConfigError


class Batch(NamedTuple):
    """What one replica trains on in one step.

    `has_samples`, `global_samples` and `finite` are Python values where they are known before the step is compiled:
    what is computed from them costs nothing then.
    """

    inputs: Any
    targets: Any
    sample_weight: Any
    """One weight for each sample, or None."""
    has_samples: tf.Tensor | float
    """1, or 0 for a replica that gets no sample of a short batch: it holds one sample that does not count."""
    global_samples: tf.Tensor | int
    """Samples of the global batch, over all replicas."""
    finite: bool | None = None
    """True where inputs and targets are known to hold neither NaN nor infinite values; None where nobody looked."""


def part_of(total: Any, index: int, size: int) -> tuple[Any, Any]:
    """Return where part `index` of `size` begins and ends among `total` samples.

    The parts differ by one sample at most; `total` may be an int or an integer tensor.
    """
    return total * index // size, total * (index + 1) // size


def per_replica(batch: int, size: int) -> int:
    """Return the samples each of `size` replicas takes of a global batch.

    Raises:
        ConfigError: it does not divide, or is no batch.
    """
    if batch < 1:
        raise ConfigError(f"A batch needs at least one sample. Received: {batch}.")
    if batch % size:
        near = max(1, batch // size) * size
        raise ConfigError(
            f"A batch of {batch} samples does not divide among {size} ranks (batch is the global batch). "
            f"Use --batch {near} or --batch {near + size}, or another number of ranks."
        )
    return batch // size


def slice_bounds(total: int, index: int, size: int) -> tuple[int, int, float]:
    """Return first and last + 1 of the samples a replica holds of a batch of `total`, and whether they count.

    A replica without samples holds a neighbour's and does not count it: layers never see an empty batch.
    """
    begin, end = part_of(total, index, size)
    first = min(begin, total - 1)
    return first, max(end, first + 1), float(end > begin)


def as_batch(elements: tuple[Any, ...], has_samples: Any, total: Any, *, finite: bool | None = None) -> Batch:
    """Name the parts of (inputs, targets[, sample weights])."""
    inputs, targets, *weights = elements
    return Batch(inputs, targets, weights[0] if weights else None, has_samples, total, finite)


def slice_batch(elements: tuple[Any, ...], index: int, size: int) -> Batch:
    """Cut this replica's part out of a global batch (inputs, targets[, sample weights]) of tensors [samples, …]."""
    total = tf.shape(tf.nest.flatten(elements)[0], out_type=tf.int64)[0]
    first, last, has_samples = slice_bounds_of_tensor(total, index, size)
    part = tf.nest.map_structure(lambda tensor: tensor[first:last], tuple(elements))
    return as_batch(part, has_samples, tf.cast(total, tf.int32))


def slice_bounds_of_tensor(total: tf.Tensor, index: int, size: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Do what `slice_bounds` does for a number that is known only when the batch is there."""
    begin, end = part_of(total, index, size)
    first = tf.minimum(begin, total - 1)
    return first, tf.maximum(end, first + 1), tf.cast(end > begin, tf.float32)
