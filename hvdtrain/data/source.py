"""The Protocol of a data source, random access to samples by number; and the splits of a data set."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from hvdtrain.data.batch import map_tensors
from hvdtrain.data.preprocessing import Preprocessing


class Source(Protocol):
    """A fixed number of samples `(inputs, targets)` or `(inputs, targets, sample_weight)`, each a nest of tensors.

    The pipeline decides from the numbers alone which samples form a batch: a source neither shuffles nor shards, and is
    the same on every rank.
    """

    @property
    def name(self) -> str:
        """Name in error messages."""

    @property
    def size(self) -> int:
        """Number of samples, at least 1."""

    @property
    def spec(self) -> tuple[Any, ...]:
        """The nest of tf.TensorSpecs of one sample; dims may be None."""

    @property
    def finite(self) -> bool:
        """Whether inputs and targets are certainly neither NaN nor infinite."""

    @property
    def heavy(self) -> bool:
        """Whether `gather` is expensive (reads files, decodes) and worth several threads."""

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """Return the samples `numbers` [n], stacked along dim 0. Called eagerly and traced by tf.data."""

    def describe(self, number: int) -> str:
        """Describe where sample `number` comes from: its file, and its position in it."""

    def fingerprint(self) -> bytes:
        """Return a hash [32 bytes] that differs if the samples differ, as far as that is cheap to find out."""


@dataclass(frozen=True)
class DataSplits:
    """The samples that a run trains and validates on, and their properties."""

    train: Source
    validation: Source
    sample_shape: Any
    """Shape of one input: a tuple, or a nest of them like the inputs."""
    classes: int | None
    """Number of classes; None if the targets are not labels."""
    finish: Callable[..., tuple[Any, ...]] | None = None
    """Last transformation of every batch, after augmentation: uint8 pixels become floats in [0, 1]."""
    preprocessing: Preprocessing = field(default_factory=Preprocessing)
    """How raw data become inputs, and the names of the classes: kept with the run, for evaluation and prediction."""
    held_out: bool = False
    """Whether the validation samples were held out of the training data."""


def batch_spec(source: Source) -> Any:
    """Return the nest of tf.TensorSpecs of a batch of any size."""
    return map_tensors(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), source.spec)


def input_shape(source: Any) -> Any:
    """Return the shape of one input: a tuple, or a nest of them like the inputs."""
    return map_tensors(lambda spec: tuple(spec.shape), source.spec[0])


def with_static_shapes(source: Source, elements: tuple[Any, ...]) -> tuple[Any, ...]:
    """Set the static shapes of `source.spec` on a batch; fails at run time if it has others."""

    def ensure(tensor: Any, spec: tf.TensorSpec) -> Any:
        if not isinstance(tensor, tf.Tensor):
            return tensor  # ragged, sparse or None
        return tf.ensure_shape(tensor, [tensor.shape[0] if tensor.shape.rank else None, *spec.shape])

    return tf.nest.map_structure(ensure, tuple(elements), source.spec)


def gathered_in_python(
    read: Callable[[np.ndarray], list[np.ndarray]], numbers: tf.Tensor, spec: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Return the samples `numbers` by a Python function of one array [n, …] for each tensor of `spec`, flattened."""
    specs = tf.nest.flatten(spec)
    parts = tf.numpy_function(read, [numbers], [each.dtype for each in specs])
    for part, each in zip(parts, specs, strict=True):
        part.set_shape([*numbers.shape, *each.shape])
    return tuple(tf.nest.pack_sequence_as(spec, parts))
