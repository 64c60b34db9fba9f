"""Passes through a model's own code, whose numbers are those of the whole batch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.data.batch import Batch, samples_in
from hvdtrain.gradients.reduction import Gradient, scaled
from hvdtrain.layers.fused_batch_norm import fused_normalization, fusible_layers
from hvdtrain.layers.sync_batch_norm import replicas_of, sync_layers
from hvdtrain.partition.gradients import part_of_gradient
from hvdtrain.partition.kinds import Part, Rows
from hvdtrain.partition.partition import Partition, unfolded
from hvdtrain.partition.step import open_rows, partition_of
from hvdtrain.partition.tracing import traced
from hvdtrain.partition.units import is_unit
from hvdtrain.runtime.guarded import guarded
from hvdtrain.state.structure import statistics_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.step.batches import keras_data, number_of_samples
from hvdtrain.training.step.contract import LocalGradients, Parameters
from hvdtrain.training.step.fetch_notes import FetchNotes
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.forward_backward import AppliedGradients, called_as
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.placeholder import kept_statistics


@contextmanager
def opened(
    batch: Batch, backend: Backend, logs: StepLogs, *, microbatch: bool = False
) -> Iterator[tuple[Batch, Partition]]:
    """Look at the operations that compute with a batch inside the context; yield it, as this rank's rows.

    Of a `microbatch`, the batch of which this rank has rows is that of all ranks' microbatches.
    """
    even = _samples_of_microbatch(batch, backend) if microbatch else batch.global_samples
    fields = ("inputs", "targets", "sample_weight")
    parts = {name: _mapped(open_rows, getattr(batch, name)) for name in fields}
    if _is_zipped(batch):
        # Two datasets, of which each rank has equal slices: their rows have nothing in common but the rank.
        one = guarded(tf.constant(1))
        place = guarded(tf.constant(backend.index))
        first = unfolded(backend.index == 0)
        partition = Partition(backend, rows=one, begin=place, total=backend.size, first=first)
        for part in parts.values():
            _mark_equal_slices(partition, part)
    else:
        exact = None if batch.nominal else even
        tensor = samples_in(batch._replace(**parts))
        partition = partition_of(backend, tensor, has_samples=batch.has_samples, total=exact)
        if tf.is_tensor(batch.has_samples) or not batch.has_samples:  # a placeholder has none
            parts = {name: _mapped(lambda each: each[: partition.count], part) for name, part in parts.items()}
        partition.mark_rows(parts)
    with traced(partition, sums=logs.variables()):
        yield batch._replace(**parts), partition


def _samples_of_microbatch(batch: Batch, backend: Backend) -> int | None:
    """Return the samples of all ranks' microbatches if all have as many; None: ranks tell one another."""
    rows, total = samples_in(batch).shape[0], batch.global_samples
    even = rows is not None and not tf.is_tensor(total) and int(total) % (rows * backend.size) == 0
    return rows * backend.size if even else None


def _mapped(function: Callable[[tf.Tensor], tf.Tensor], nest: Any) -> Any:
    return tf.nest.map_structure(lambda each: None if each is None else function(each), nest)


def _is_zipped(batch: Batch) -> bool:
    """Return whether a batch is of two datasets that were zipped, whose batches differ in length."""
    tensors = tf.nest.flatten((batch.inputs, batch.targets))
    return isinstance(batch.targets, tuple) and len({each.shape[0] for each in tensors if each is not None}) > 1


def _mark_equal_slices(partition: Partition, nest: Any) -> None:
    tensors = [each for each in tf.nest.flatten(nest) if each is not None]
    for tensor in tensors:
        with partition.plain():
            rows = tf.shape(tensors[0])[0]
        partition.mark(tensor, Rows(0, (rows,)))


def samples_of_batch(batch: Batch, partition: Partition) -> tf.Tensor:
    """Return the number of samples on all ranks, in float64."""
    return tf.cast(batch.global_samples if _is_zipped(batch) else partition.total, tf.float64)


def units_statistics(model: Any) -> list[tf.Variable]:
    """Return the statistics that layers update from this rank's samples alone, by design."""
    synchronized = sync_layers(model)
    layers = [layer for layer in flatten_layers(model) if is_unit(layer) and layer not in synchronized]
    return [variable for layer in layers for variable in statistics_of(layer)]


def settled_results(partition: Partition, logs: StepLogs, returned: Any) -> Any:
    """Return a step's results, of which those that are no metric's are parts of a sum over the ranks."""
    own = logs.own_values(returned)

    def part(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: part(key, each) for key, each in value.items()}
        if str(name) not in own or isinstance(value, str):
            return value
        return partition.part(tf.convert_to_tensor(value))

    return part("", returned)


class WholeBatchPass:
    """Calls the model's `train_step` on this replica's rows of the batch, and takes the gradients that it applies.

    Args:
        logs: records the results of the step.
        forward: takes the place of the model's call, such as one that recomputes; default: the model's own.
        parameters: what is read and differentiated for the trained variables.
        notes: says what the step fetches.
        microbatches: whether a pass may be one of several of a step: each is a batch of its own, by which the gradients
            of a step weigh, as those of Keras' `gradient_accumulation_steps` do.
    """

    def __init__(
        self,
        backend: Backend,
        state: TrainState,
        logs: StepLogs,
        *,
        forward: Callable[..., Any] | None = None,
        parameters: Parameters | None = None,
        notes: FetchNotes | None = None,
        microbatches: bool = False,
    ) -> None:
        self._notes = notes
        self._microbatches = microbatches
        self._backend = backend
        self._state = state
        self._logs = logs
        self._forward = forward
        self._synchronized = sync_layers(state.model)
        self._fusible = fusible_layers(state.model)
        self._parameters = parameters or Parameters(state.trainable)
        self._statistics = units_statistics(state.model)

    def report_loss(self, batch: Batch, loss: tf.Tensor) -> None:
        """Report nothing: the step's own loss is that of the batch."""

    def __call__(
        self, batch: Batch, *, first: bool = True, within: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> LocalGradients:
        """Run a microbatch, the `first` of its step or another, within `within()`."""
        model = self._state.model
        poison = (
            zero_if_finite(tf.nest.flatten((batch.inputs, batch.targets))) if not batch.finite else tf.constant(0.0)
        )
        samples = number_of_samples(batch)
        with (
            kept_statistics(self._statistics, batch, synchronized=self._synchronized),
            replicas_of(self._synchronized, self._backend, batch.has_samples),
            fused_normalization(self._fusible),
            self._parameters.passes(1.0) as passes,  # a rank without samples has its part of what is whole
        ):
            taken = AppliedGradients(self._state, passes, self._parameters.sources())
            with (
                within(),
                opened(batch, self._backend, self._logs, microbatch=self._microbatches) as (rows, partition),
                taken.from_step(),
                self._logs.recording(),
                called_as(model, self._forward),
            ):
                returned = take_train_step(model, rows)
                partition.cause = "the results of the step"
                returned = settled_results(partition, self._logs, returned)
            total = samples_of_batch(batch, partition)
            expected = tf.cast(batch.global_samples, tf.float64)
            weighs = batch.nominal or self._microbatches
            factor = tf.math.divide_no_nan(total, expected) if weighs else None
            partition.cause = "the gradients"
            mine = [part_of_gradient(partition, each) for each in taken.gradients()]
            gradients, poison_of_each = passes.collected(
                mine if factor is None else [scaled(each, factor) for each in mine]
            )
        if self._notes is not None:
            self._notes.note(partition, batch)
        watched = self._logs.take(returned, samples, whole=total, first=first)
        loss = tf.add_n([tf.cast(each, tf.float64) for each in watched])
        dtype = tf.float64 if watched[0].dtype == tf.float64 else tf.float32
        parts = (loss * total, samples, tf.where(samples > 0, tf.cast(poison, tf.float64), tf.zeros([], tf.float64)))
        return LocalGradients(
            gradients=gradients,
            totals=tf.cast(tf.stack(parts), dtype),
            expected_weight=expected,
            uniform=not batch.nominal,
            poison=poison_of_each,
        )


def take_train_step(model: Any, batch: Batch) -> Any:
    """Return the result of the model's `train_step`."""
    step = getattr(model.train_step, "python_function", model.train_step)
    return step(keras_data(batch))


def as_applied(partition: Partition, gradients: Sequence[Gradient]) -> tuple[list[Gradient], bool]:
    """Return gradients of which the mean over the ranks is the gradient, and whether it is each rank's already."""
    size = partition.collectives.size
    kinds = [partition.kind(each.values if isinstance(each, tf.IndexedSlices) else each) for each in gradients]
    if all(each is None for each in kinds):
        return list(gradients), True
    made: list[Gradient] = []
    for gradient, kind in zip(gradients, kinds, strict=True):
        if isinstance(kind, Part) and not partition.has_whole(gradient):
            made.append(partition.part(gradient) * tf.cast(size, gradient.dtype))
        elif isinstance(kind, Rows) and isinstance(gradient, tf.IndexedSlices):
            made.append(scaled(gradient, tf.constant(float(size))))
        else:
            made.append(gradient if gradient is None or kind is None else partition.whole(gradient))
    return made, False
