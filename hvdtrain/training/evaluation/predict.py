"""Predictions over all replicas, in the order of the inputs."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import joined_outputs
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.batch import Batch, of_any_length
from hvdtrain.data.streams.given import batched, in_step
from hvdtrain.data.streams.python_batches import as_function, is_stream
from hvdtrain.training.evaluation.evaluate import is_stopped
from hvdtrain.training.inputs import first_batches, own_evaluation_data, validation_batches
from hvdtrain.training.step.batches import called, inputs_for, keras_data, replica_slice


class Predictor:
    """Predicts on each replica's share of the inputs, and gathers outputs.

    Where an output is not one of samples, such as a mean over the batch, or has dims that the samples of a batch
    decide, such as their longest sequence, every replica predicts whole batches.
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
        return predicted(in_step(batches), self._outputs_for, callbacks, ranks=self._backend.job_size)

    def _outputs_for(self, batch: Batch) -> Any:
        if self._needs_all is None:
            self._needs_all = self._backend.data_parallel.size > 1 and self._depends_on_batch(batch)
        return called(self._outputs, batch)

    def _depends_on_batch(self, batch: Batch) -> bool:
        return depends_on_batch(self._model.predict_step, keras_data(batch))

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
        return tf.nest.map_structure(lambda each: each[:rows], called(call, batch))

    return predicted(batches, of, callbacks)


def predicted(
    batches: Iterable[Any], outputs_of: Callable[[Any], Any], callbacks: Any = None, *, ranks: int = 1
) -> Any:
    """Return the outputs of all batches, joined as Keras does, and call the `callbacks`. Raises DataError if empty.

    `ranks` is how many go through the batches together.
    """
    parts: list[Any] = []
    if callbacks is not None:
        callbacks.model.stop_predicting = False
        callbacks.on_predict_begin()
    at_once = 1 if callbacks is None else callbacks.model.steps_per_execution
    for together in batched(batches, at_once):
        if callbacks is not None:
            callbacks.on_predict_batch_begin(len(parts))
        made = [outputs_of(batch) for batch in together]
        if callbacks is not None:
            outputs = made[0] if len(made) == 1 else tf.nest.map_structure(_tensor, _joined(made))
            callbacks.on_predict_batch_end(len(parts) + at_once - 1, {"outputs": outputs})
        parts += made
        if callbacks is not None and is_stopped(callbacks.model, "stop_predicting", ranks):
            break
    if callbacks is not None:
        callbacks.on_predict_end()
    if not parts:
        raise DataError("There is nothing to predict: the data hold no samples.")
    return _joined(parts)


def _tensor(value: Any) -> Any:
    return value if tf.is_tensor(value) else tf.convert_to_tensor(value)


def _joined(parts: Sequence[Any]) -> Any:
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


Gather = Callable[..., tf.Tensor]
_SENT = (tf.uint8, tf.int8, tf.uint16, tf.int16, tf.int32, tf.int64, tf.float16, tf.float32, tf.float64, tf.bool)
"""Dtypes that Horovod sends."""
_OF_SIZE = {1: tf.uint8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def all_rows(value: Any, gather: Gather, name: str) -> Any:
    """Return the rows of all replicas, of a tensor or a RaggedTensor. Collective.

    Args:
        value: this replica's rows.
        gather: concatenates tensors along dim 0, of a dtype that Horovod sends.
        name: names the messages.

    Raises:
        ConfigError: a SparseTensor.
    """
    if isinstance(value, tf.RaggedTensor):
        lengths = [gather(each, name=f"{name}/lengths{depth}") for depth, each in enumerate(value.nested_row_lengths())]
        return tf.RaggedTensor.from_nested_row_lengths(all_rows(value.flat_values, gather, name), lengths)
    if isinstance(value, tf.SparseTensor):
        raise ConfigError("predict returns no SparseTensor on several ranks: return tf.sparse.to_dense(outputs).")
    if value.dtype == tf.string:
        return _all_strings(value, gather, name)
    if value.dtype.is_complex:
        parts = gather(tf.stack([tf.math.real(value), tf.math.imag(value)], -1), name=name)
        return tf.complex(parts[..., 0], parts[..., 1])
    if value.dtype not in _SENT:
        return tf.bitcast(gather(tf.bitcast(value, _OF_SIZE[value.dtype.size]), name=name), value.dtype)
    return gather(value, name=name)


def _all_strings(value: tf.Tensor, gather: Gather, name: str) -> tf.Tensor:
    """Gather the bytes of all strings, and how many bytes and strings each replica has."""
    flat = tf.reshape(value, [-1])
    lengths = gather(tf.strings.length(flat), name=f"{name}/lengths")
    joined = gather(tf.io.decode_raw(tf.strings.reduce_join(flat), tf.uint8), name=name)
    characters = tf.gather(tf.constant([bytes([code]) for code in range(256)]), tf.cast(joined, tf.int32))
    strings = tf.strings.reduce_join(tf.RaggedTensor.from_row_lengths(characters, lengths), axis=-1)
    return tf.reshape(strings, tf.concat([[-1], tf.shape(value)[1:]], 0))


def depends_on_batch(step: Callable[[Any], Any], data: Any) -> bool:
    """Return whether replicas cannot put an output of `step` together from those of their slices.

    It has as many rows for any number of samples, such as a mean over a batch, or an inner dim that is not known from
    the shapes of the inputs.

    Args:
        step: computes a batch.
        data: a batch.
    """
    try:
        outputs = tf.function(step, autograph=False).get_concrete_function(of_any_length(data)).structured_outputs
    except Exception:
        return False  # the step has to know the number of samples, and fails by itself where it is another
    return any(_is_fixed(each.shape) or _is_of_values(each) for each in tf.nest.flatten(outputs))


def _is_fixed(shape: tf.TensorShape) -> bool:
    return shape.rank is not None and (shape.rank == 0 or shape[0] is not None)


def _is_of_values(output: Any) -> bool:
    if isinstance(output, tf.RaggedTensor | tf.RaggedTensorSpec):
        return False
    return output.shape.rank is None or not output.shape[1:].is_fully_defined()
