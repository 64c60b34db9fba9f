"""A replica's slice of a batch, and its microbatches."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.compat.keras import input_nest
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.data.batch import (
    Batch,
    of_any_length,
    rows_of,
    samples_in,
    slice_bounds,
    slice_bounds_of_tensor,
    tensors_in,
)
from hvdtrain.runtime.guarded import guarded
from hvdtrain.training.step.traced import traced_anew


def replica_slice(batch: Batch, backend: Backend) -> Batch:
    """Return this replica's slice of `batch`, under `Backend.run`.

    With one replica per process, it is the whole batch. A process with all replicas reads global batches, which are
    sliced as between processes.
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
    """Hide from graph optimization whether `batch` is a placeholder.

    With a constant, TensorFlow would prune this replica's passes, including the all-to-alls of experts and sharded
    tables that other ranks wait for: a deadlock.
    """
    if tf.is_tensor(batch.has_samples) or batch.has_samples:
        return batch
    return batch._replace(has_samples=guarded(tf.constant(batch.has_samples)))


def per_microbatch(batch: int, replicas: int, accumulate: int, *, uneven: bool = False) -> int:
    """Return the samples of a microbatch: `batch` / `replicas` / `accumulate`. Raises ConfigError if not divisible."""
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
    """A replica's slice as microbatches of up to `length` samples, equally many everywhere."""

    def __init__(self, batch: Batch, replicas: int, length: int) -> None:
        largest = -(-batch.global_samples // replicas)
        self.count = -(-largest // length)
        """Number of microbatches of the largest slice; an int if the batch size is static."""
        self._batch = batch
        self._length = length
        self._tensors = (batch.inputs, batch.targets, batch.sample_weight)
        self._first = tensors_in(self._tensors)[0]
        self._even = not tf.is_tensor(self.count) and self._first.shape[0] == self.count * length

    @property
    def single(self) -> bool:
        """Whether there is statically only one."""
        return not tf.is_tensor(self.count) and self.count == 1

    def take(self, number: Any) -> Batch:
        """Return microbatch `number`, an int or an integer tensor.

        One without samples on this replica holds a neighbour's samples with a count of zero, hidden from graph
        optimization: with a constant, TensorFlow would prune operations that other ranks wait for.
        """
        begin = number * self._length
        if self._even and (tf.is_tensor(number) or number < self.count):
            return self._part(lambda t: tf.ensure_shape(t[begin : begin + self._length], [self._length, *t.shape[1:]]))
        samples = tf.shape(self._first)[0]
        within = tf.cast(begin < tf.maximum(samples, 1), tf.float32)
        has_samples = tf.cast(self._batch.has_samples, tf.float32) * within
        begin = tf.minimum(begin, samples - 1)
        end = tf.maximum(tf.minimum(begin + self._length, samples), begin + 1)
        return self._part(lambda t: t[begin:end])._replace(has_samples=guarded(has_samples))

    def _part(self, cut: Callable[[tf.Tensor], tf.Tensor]) -> Batch:
        inputs, targets, weights = tf.nest.map_structure(lambda t: None if t is None else cut(t), self._tensors)
        return self._batch._replace(inputs=inputs, targets=targets, sample_weight=weights)


def keras_data(batch: Batch) -> Any:
    """Return a batch in the form of `train_step`."""
    return batch.inputs if batch.targets is None else parts_of(batch)


def parts_of(batch: Batch) -> tuple[Any, ...]:
    """Return inputs, targets, which may be None, and sample weights, if there are any."""
    return batch[:2] if batch.sample_weight is None else batch[:3]


def called(function: Callable[[Batch], Any], batch: Batch) -> Any:
    """Call a compiled `function`; of a batch without samples by a graph for any number of them.

    TensorFlow has no gradients of means over a dim that is known to be 0.
    """
    if samples_in(batch).shape[0] == 0:
        function.get_concrete_function(of_any_length(batch))  # type: ignore[attr-defined]
    return function(batch)


def take_train_step(model: Any, batch: Batch) -> Any:
    """Return the result of the model's `train_step`, which may be a `tf.function`, as may what it calls."""
    step = getattr(model.train_step, "python_function", model.train_step)
    with traced_anew():
        return step(keras_data(batch))


def inputs_for(model: Any, inputs: Any) -> Any:
    """Convert tf.data's tuple of inputs to a list if models expect it."""
    listed = isinstance(inputs, tuple) and isinstance(input_nest(model), list)
    return list(inputs) if listed else inputs


def number_of_samples(batch: Batch) -> tf.Tensor:
    """Return the number of a replica's samples in float64; 0 for a placeholder."""
    first = samples_in(batch)
    count = rows_of(first) if first.shape[0] is None else first.shape[0]
    return tf.cast(count, tf.float64) * tf.cast(batch.has_samples, tf.float64)


def counts_of(batch: Batch, replicas: Collectives) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the samples of a replica, and those of all, as a step weighs its gradients by them, in float64.

    A batch without any is a step, too, in which penalties of weights count: it weighs as one sample, of which each
    replica has a part.
    """
    samples, total = number_of_samples(batch), tf.cast(batch.global_samples, tf.float64)
    if not tf.is_tensor(batch.global_samples):
        return samples, total
    part = tf.cast(batch.has_samples, tf.float64) / replicas.size
    return tf.where(total > 0, samples, part), tf.maximum(total, 1.0)


def has_own_train_step(model: Any) -> bool:
    """Return whether a model's class has a `train_step` of its own."""
    return _overrides(model, "train_step")


def applies_nothing(model: Any) -> ConfigError:
    """Return the error of a `train_step` that applies no gradients."""
    return ConfigError(
        f"train_step of {type(model).__name__} must apply its gradients with an optimizer that is an attribute of the "
        "model, such as self.optimizer: gradients are exchanged there, and what is changed otherwise differs from rank "
        "to rank."
    )


def reads_outputs(model: Any) -> bool:
    """Return whether a model's class has code of its own that reads the outputs for losses and metrics."""
    return _overrides(model, "train_step", "test_step", "compute_loss", "compute_metrics")


def forms_own_loss(model: Any, step: str) -> bool:
    """Return whether code of a model's class forms the losses in its `train_step` or `test_step`."""
    return _overrides(model, step, "compute_loss")


def _overrides(model: Any, *names: str) -> bool:
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)
