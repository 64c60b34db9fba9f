"""A replica's slice of one global batch, and the arithmetic of slicing."""

from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.config.errors import ConfigError


class Batch(NamedTuple):
    """One replica's slice of a global batch: what it trains on in one step.

    `has_samples`, `global_samples` and `finite` are Python values where they are known before the step is compiled: the
    compiled step then computes nothing from them.
    """

    inputs: Any
    targets: Any
    sample_weight: Any
    """Weights [samples], or None."""
    has_samples: tf.Tensor | float
    """1, or 0 for a replica without samples of a short batch: it holds one placeholder sample that does not count."""
    global_samples: tf.Tensor | int
    """Samples of the global batch."""
    finite: bool | None = None
    """True if inputs and targets are known to hold neither NaN nor infinite values; None if that was not checked."""
    nominal: bool | None = None
    """True if `global_samples` counts a full batch on every replica, which some may not have: the step then divides by
    the weights that were added up."""


def split_bounds(total: Any, index: int, size: int) -> tuple[Any, Any]:
    """Return begin and end of slice `index` when `total` samples are split into `size` slices.

    Slices differ by one sample at most; `total` may be an int or an integer tensor.
    """
    return total * index // size, total * (index + 1) // size


def per_replica(batch: int, size: int) -> int:
    """Return the samples per replica of a global batch over `size` replicas.

    Raises:
        ConfigError: `batch` is not positive, or does not divide.
    """
    if batch < 1:
        raise ConfigError(f"A batch needs at least one sample. Received: {batch}.")
    if batch % size:
        near = max(1, batch // size) * size
        raise ConfigError(
            f"A batch of {batch} samples does not divide among {size} ranks (batch is the global batch). "
            f"Use --batch={near} or --batch={near + size}, or another number of ranks."
        )
    return batch // size


def slice_bounds(total: int, index: int, size: int) -> tuple[int, int, float]:
    """Return begin and end of a replica's slice of a batch of `total` samples, and whether it counts.

    A replica without samples holds a neighbour's, uncounted, since layers fail on empty batches.
    """
    begin, end = split_bounds(total, index, size)
    first = min(begin, total - 1)
    return first, max(end, first + 1), float(end > begin)


def as_batch(elements: tuple[Any, ...], has_samples: Any, total: Any, *, finite: bool | None = None) -> Batch:
    """Make a `Batch` of (inputs, targets[, sample weights])."""
    inputs, targets, *weights = elements
    return Batch(inputs, targets, weights[0] if weights else None, has_samples, total, finite)


def slice_batch(elements: tuple[Any, ...], index: int, size: int) -> Batch:
    """Take this replica's slice of a global batch (inputs, targets[, sample weights]) of tensors [samples, …]."""
    total = tf.shape(tf.nest.flatten(elements)[0], out_type=tf.int64)[0]
    first, last, has_samples = slice_bounds_of_tensor(total, index, size)
    part = tf.nest.map_structure(lambda tensor: tensor[first:last], tuple(elements))
    return as_batch(part, has_samples, tf.cast(total, tf.int32))


def slice_bounds_of_tensor(total: tf.Tensor, index: int, size: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Do what `slice_bounds` does for a `total` known only at run time."""
    begin, end = split_bounds(total, index, size)
    first = tf.minimum(begin, total - 1)
    return first, tf.maximum(end, first + 1), tf.cast(end > begin, tf.float32)
