"""Predictions over all replicas, in the order of the inputs."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import joined_outputs
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import DataError
from hvdtrain.data.batch import Batch
from hvdtrain.data.streams.given import in_step
from hvdtrain.data.streams.python_batches import as_function, is_stream
from hvdtrain.training.data_arguments import first_batches
from hvdtrain.training.evaluation.outputs import all_rows, has_fixed_rows
from hvdtrain.training.inputs import validation_batches
from hvdtrain.training.rank_inputs import own_evaluation_data
from hvdtrain.training.step.batches import inputs_for, keras_data, replica_slice


class Predictor:
    """Predicts on each replica's share of the inputs, and gathers outputs.

    Where an output is not one of samples, such as a mean over the batch, every replica predicts whole batches.
    """

    def __init__(self, backend: Backend, model: Any) -> None:
        self._backend = backend
        self._model = model
        self._needs_all: bool | None = None
        self._outputs = compiled(lambda batch: backend.run(self._outputs_of, batch), reduce_retracing=True)

    def __call__(self, batches: Iterable[Batch], callbacks: Any = None) -> Any:
        """Return the outputs [samples, …] in the model's structure. Raises DataError if empty. Collective.

        `callbacks` is a Keras CallbackList.
        """
        return predicted(in_step(batches), self._outputs_for, callbacks)

    def _outputs_for(self, batch: Batch) -> Any:
        if self._needs_all is None:
            self._needs_all = self._backend.data_parallel.size > 1 and self._has_fixed_rows(batch)
        return self._outputs(batch)

    def _has_fixed_rows(self, batch: Batch) -> bool:
        return has_fixed_rows(self._model.predict_step, keras_data(batch))

    def _outputs_of(self, batch: Batch) -> Any:
        batch = replica_slice(batch, self._backend)
        if self._needs_all:
            return self._model.predict_step(self._of_all_replicas(batch, keras_data(batch), "prediction/input"))
        return self._of_all_replicas(batch, self._model.predict_step(keras_data(batch)), "prediction/output")

    def _of_all_replicas(self, batch: Batch, values: Any, name: str) -> Any:
        # Replicas hold consecutive slices of the global batch, so gathering keeps the order. Placeholders are dropped.
        counted, gather = tf.cast(batch.has_samples, tf.int32), self._backend.data_parallel.all_gather
        flat = [
            all_rows(_first_rows(each, counted), gather, name=f"{name}{place}")
            for place, each in enumerate(tf.nest.flatten(values))
        ]
        return tf.nest.pack_sequence_as(values, flat)


def _first_rows(value: Any, counted: tf.Tensor) -> Any:
    """Return all rows, or none."""
    rows = value.nrows() if isinstance(value, tf.RaggedTensor) else tf.shape(value)[0]
    return value[: tf.cast(counted, rows.dtype) * rows]


def build_for(model: Any, batches: Iterable[Batch]) -> None:
    """Build `model`, if necessary, for the first of `batches`; nothing is computed."""
    if not model.built:
        inputs, _, _ = keras.utils.unpack_x_y_sample_weight(keras_data(next(iter(batches))))
        call = tf.function(lambda inputs: model(inputs, training=False), autograph=False)
        call.get_concrete_function(inputs_for(model, inputs))


def own_outputs(model: Any, batches: Iterable[Batch], callbacks: Any = None) -> Any:
    """Return the outputs [samples, …] for this rank's batches, without communication."""
    call = compiled(lambda batch: model.predict_step(keras_data(batch)), reduce_retracing=True)

    def of(batch: Batch) -> Any:
        rows = None if float(batch.has_samples) else 0
        return tf.nest.map_structure(lambda each: each[:rows], call(batch))

    return predicted(batches, of, callbacks)


def predicted(batches: Iterable[Any], outputs_of: Callable[[Any], Any], callbacks: Any = None) -> Any:
    """Return the outputs of all batches, joined as Keras does, and call the `callbacks`. Raises DataError if empty."""
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
    return tf.nest.map_structure(lambda *each: joined_outputs(each), *parts)


def prediction_batches(
    data: Any, backend: Backend, *, batch: int, steps: int | None = None, shard: str | None = None
) -> Iterable[Batch]:
    """Return this replica's share of inputs: arrays, a nest of them, or batches of all that `fit` takes.

    Reads `steps` batches, or all. Raises DataError if ranks have different inputs.
    """
    given = as_function(data, steps_per_epoch=0) if inspect.isgenerator(data) else data
    if not isinstance(given, tf.data.Dataset) and not is_stream(given):
        given = (given,)
    if shard is not None and backend.processes > 1:
        return own_evaluation_data(given, backend, batch=batch, steps=steps, what="prediction")
    return validation_batches(first_batches(given, steps, batch), backend, batch=batch, what="prediction")
