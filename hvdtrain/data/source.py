"""What a source of samples is: it reads any of them, by number, in any order."""

from typing import Any, Protocol

import tensorflow as tf


class Source(Protocol):
    """A fixed number of samples `(inputs, targets)` or `(inputs, targets, sample_weight)`, each a nest of tensors.

    Which samples form a batch is decided by the pipeline, from their numbers alone: a source neither shuffles nor
    shards, and every rank holds the same one.
    """

    @property
    def name(self) -> str:
        """What error messages call it."""

    @property
    def size(self) -> int:
        """Number of samples, at least 1."""

    @property
    def spec(self) -> tuple[Any, ...]:
        """The tf.TensorSpec of each tensor of one sample, in their nest; dims may be None."""

    @property
    def finite(self) -> bool:
        """Whether inputs and targets are certainly neither NaN nor infinite."""

    @property
    def heavy(self) -> bool:
        """Whether `gather` reads files or decodes, so that several threads should do it."""

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """Return the samples `numbers` [n], stacked along dim 0; it is traced by tf.data, and called eagerly."""

    def describe(self, number: int) -> str:
        """Say where sample `number` comes from: its file, and its place within it."""

    def fingerprint(self) -> bytes:
        """Return a hash [32 bytes] that differs where samples differ, as far as that is cheap to tell."""


def batch_spec(source: Source) -> Any:
    """Return the tf.TensorSpec of each tensor of a batch of any size."""
    return tf.nest.map_structure(lambda spec: tf.TensorSpec([None, *spec.shape], spec.dtype), source.spec)


def input_shape(source: Source) -> Any:
    """Return the shape of one input, as a nest like the inputs."""
    return tf.nest.map_structure(lambda spec: tuple(spec.shape), source.spec[0])


def settled(source: Source, elements: tuple[Any, ...]) -> tuple[Any, ...]:
    """Give the tensors of a batch the static shapes that `source` promises; a batch of others is an error."""

    def settle(tensor: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
        return tf.ensure_shape(tensor, [tensor.shape[0] if tensor.shape.rank else None, *spec.shape])

    return tf.nest.map_structure(settle, tuple(elements), source.spec)
