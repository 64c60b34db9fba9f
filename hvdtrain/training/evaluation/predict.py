"""Predictions over all replicas, in the order of the inputs."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch
from hvdtrain.data.streams.given import in_step
from hvdtrain.training.data_arguments import first_batches
from hvdtrain.training.inputs import validation_batches
from hvdtrain.training.rank_inputs import own_evaluation_data
from hvdtrain.training.step.batches import inputs_for, keras_data, replica_slice


class Predictor:
    """Predicts on each replica's share of the inputs, and gathers outputs."""

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model
        self._outputs = tf.function(
            lambda batch: backend.run(self._outputs_of, batch), autograph=False, reduce_retracing=True
        )

    def __call__(self, batches: Iterable[Batch], callbacks: Any = None) -> Any:
        """Return the outputs [samples, …] in the model's structure. Raises DataError if empty. Collective.

        `callbacks` is a Keras CallbackList.
        """
        return predicted(in_step(batches), lambda batch: numpy_of(self._outputs(batch)), callbacks)

    def _outputs_of(self, batch: Batch) -> Any:
        batch = replica_slice(batch, self._backend)
        return self._of_all_replicas(batch, self._model.predict_step(keras_data(batch)))

    def _of_all_replicas(self, batch: Batch, outputs: Any) -> Any:
        # Replicas hold consecutive slices of the global batch, so gathering keeps the order. Placeholders are dropped.
        counted = tf.cast(batch.has_samples, tf.int32)
        flat = [
            self._backend.data_parallel.all_gather(
                tensor[: counted * tf.shape(tensor)[0]], name=f"prediction/output{place}"
            )
            for place, tensor in enumerate(tf.nest.flatten(outputs))
        ]
        return tf.nest.pack_sequence_as(outputs, flat)


def build_for(model: Any, batches: Iterable[Batch]) -> None:
    """Build `model`, if necessary, by calling it on the first of `batches`."""
    if not model.built:
        model(inputs_for(model, next(iter(batches)).inputs), training=False)


def own_outputs(model: Any, batches: Iterable[Batch], callbacks: Any = None) -> Any:
    """Return the outputs [samples, …] for this rank's batches, without communication."""
    call = tf.function(lambda batch: model.predict_step(keras_data(batch)), autograph=False, reduce_retracing=True)

    def of(batch: Batch) -> Any:
        rows = None if float(batch.has_samples) else 0
        return tf.nest.map_structure(lambda tensor: tensor[:rows].numpy(), call(batch))

    return predicted(batches, of, callbacks)


def predicted(batches: Iterable[Any], outputs_of: Callable[[Any], Any], callbacks: Any = None) -> Any:
    """Return the outputs of all batches, calling the `callbacks` as Keras does. Raises DataError if there are none."""
    parts = []
    if callbacks is not None:
        callbacks.on_predict_begin()
    for number, batch in enumerate(batches):
        if callbacks is not None:
            callbacks.on_predict_batch_begin(number)
        parts.append(outputs_of(batch))
        if callbacks is not None:
            callbacks.on_predict_batch_end(number, {"outputs": parts[-1]})
    if callbacks is not None:
        callbacks.on_predict_end()
    if not parts:
        raise DataError("There is nothing to predict: the data hold no samples.")
    return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)


def numpy_of(outputs: Any) -> Any:
    """Return a nest of tensors as arrays."""
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), outputs)


def prediction_batches(
    data: Any, backend: Backend, *, batch: int, steps: int | None = None, shard: str | None = None
) -> Iterable[Batch]:
    """Return this replica's share of inputs: arrays, a nest of them, or a batched Dataset.

    For a Dataset of tuples, only the first element is used. Reads `steps` batches, or all. Raises DataError if ranks
    have different inputs.
    """
    if isinstance(data, tf.data.Dataset):
        given: Any = data.map(_with_no_targets)
    else:
        given = data, np.zeros(len(tf.nest.flatten(data)[0]), np.int32)
    if shard is not None and backend.processes > 1:
        return own_evaluation_data(given, backend, batch=batch, steps=steps, what="prediction")
    return validation_batches(first_batches(given, steps, batch), backend, batch=batch, what="prediction")


def _with_no_targets(*elements: Any) -> tuple[Any, tf.Tensor]:
    inputs = elements[0]
    return inputs, tf.zeros(tf.shape(tf.nest.flatten(inputs)[0])[:1], tf.int32)
