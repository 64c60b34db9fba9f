"""Outputs of all replicas in the order of their samples: of any dtype, ragged ones too."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import map_tensors

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


def has_fixed_rows(step: Callable[[Any], Any], data: Any) -> bool:
    """Return whether an output of `step` has as many rows for any number of samples, such as a mean over a batch.

    Replicas cannot put it together from their slices.

    Args:
        step: computes a batch.
        data: a batch.
    """
    specs = map_tensors(_of_any_length, data)
    try:
        outputs = tf.function(step, autograph=False).get_concrete_function(specs).structured_outputs
    except Exception:
        return False  # the step has to know the number of samples, and fails by itself where it is another
    return any(_is_fixed(each.shape) for each in tf.nest.flatten(outputs))


def _of_any_length(value: Any) -> Any:
    shape = [None, *value.shape[1:]]
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec(shape, value.dtype)
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
    return tf.TensorSpec(shape, value.dtype) if tf.is_tensor(value) else value


def _is_fixed(shape: tf.TensorShape) -> bool:
    return shape.rank is not None and (shape.rank == 0 or shape[0] is not None)
