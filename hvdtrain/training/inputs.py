"""What `fit` and `evaluate` accept as data, brought into the form that the loop reads."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.batch import Batch, per_replica
from hvdtrain.data.datasets import DatasetTraining, evaluation_of_dataset
from hvdtrain.data.pipeline import SourceEvaluation, SourceTraining, TrainingData
from hvdtrain.data.python_code import warn_of_python
from hvdtrain.data.streams import (
    GeneratorTraining,
    PyDatasetTraining,
    StreamEvaluation,
    first_batch,
    is_stream,
    mapped,
)

ORDER_TIMEOUT_S = 300.0


def training_data(
    data: Any, backend: Backend, *, batch: int | None, seed: int, shuffle: bool, steps_per_epoch: int | None
) -> TrainingData:
    """Return the stream of this replica's batches of `data`.

    Args:
        data: `(inputs, targets[, sample_weight])` arrays, an ArraySource, a tf.data.Dataset of such tuples, or global
            batches of them: a keras.utils.PyDataset, or a generator function.
        backend: the replicas.
        batch: samples of a global batch; None where there are global batches already.
        seed: decides the order of arrays, and of a PyDataset's batches.
        shuffle: whether these are shuffled; the order of the others is their own.
        steps_per_epoch: steps of an epoch of data that do not end.

    Raises:
        ConfigError: no batch where one is needed, or one that does not divide among the replicas.
        DataError: no samples, or ranks that read them in different orders.
    """
    if is_stream(data):
        return _stream(data, backend, batch, seed, shuffle, steps_per_epoch)
    if not isinstance(data, tf.data.Dataset):
        if batch is None:
            raise ConfigError("Arrays need a batch: pass fit(…, batch=N), the samples per step over all ranks.")
        if steps_per_epoch is not None:
            raise ConfigError("steps_per_epoch is for datasets that do not end; arrays have their own length.")
        source = data if isinstance(data, ArraySource) else ArraySource(data)
        per_replica(batch, backend.size)
        return SourceTraining(
            source, batch=batch, index=backend.process, size=backend.processes, seed=seed, shuffle=shuffle
        )
    if backend.index == 0:
        warn_of_python(data)
    dataset = data if batch is None else data.batch(batch)
    first = _first(dataset)
    _check_same_order(first, backend, "Give shuffle() a seed")
    size = batch or int(tf.nest.flatten(first)[0].shape[0])
    per_replica(size, backend.size)
    return DatasetTraining(
        dataset, batch=size, index=backend.process, size=backend.processes, steps_per_epoch=steps_per_epoch
    )


def _stream(
    data: Any, backend: Backend, batch: int | None, seed: int, shuffle: bool, steps_per_epoch: int | None
) -> TrainingData:
    if batch is not None:
        raise ConfigError(f"The data come in batches already: leave out batch. Received: batch={batch}.")
    first = first_batch(data)
    _check_same_order(first, backend, "Draw from generators with a seed")
    size = len(tf.nest.flatten(first)[0])
    per_replica(size, backend.size)
    if isinstance(data, keras.utils.PyDataset):
        return PyDatasetTraining(
            data,
            batch=size,
            index=backend.process,
            size=backend.processes,
            seed=seed,
            shuffle=shuffle,
            steps_per_epoch=steps_per_epoch,
        )
    return GeneratorTraining(
        data, batch=size, index=backend.process, size=backend.processes, steps_per_epoch=steps_per_epoch
    )


def with_class_weights(data: Any, class_weight: Mapping[int, float] | None) -> Any:
    """Return `data` with sample weights that are multiplied by what each sample's class counts.

    Args:
        data: what `training_data` takes, with integer or one-hot targets.
        class_weight: weights by label; labels that are not in it count 1.

    Raises:
        ConfigError: targets that are no labels.
    """
    if class_weight is None:
        return data
    negative = next((label for label in class_weight if int(label) < 0), None)
    if negative is not None:
        raise ConfigError(f"class_weight counts labels from 0. Received: {negative}.")
    table = np.ones(1 + max(int(label) for label in class_weight), np.float32)
    for label, weight in class_weight.items():
        table[int(label)] = weight
    if is_stream(data):
        return mapped(data, lambda *elements: _weighted(elements, table))
    if isinstance(data, tf.data.Dataset):
        return data.map(lambda *elements: _weighted(elements, table))
    elements = data.elements if isinstance(data, ArraySource) else tuple(data)
    return tf.nest.map_structure(np.asarray, _weighted(elements, table))


def _weighted(elements: tuple[Any, ...], table: np.ndarray) -> tuple[Any, ...]:
    inputs, targets, *weights = elements
    if tf.nest.is_nested(targets):
        raise ConfigError("class_weight is for models with one output: give sample weights instead.")
    labels = tf.convert_to_tensor(targets)
    if labels.dtype.is_floating or (labels.shape.rank is not None and labels.shape.rank > 1 and labels.shape[-1] > 1):
        if labels.shape.rank != 2:
            raise ConfigError(f"class_weight needs labels or one-hot targets. Received: targets of {labels.shape}.")
        labels = tf.argmax(labels, -1)
    labels = tf.reshape(labels, [-1])
    known = tf.gather(table, tf.minimum(tf.cast(labels, tf.int64), len(table) - 1))
    factor = tf.where(tf.cast(labels, tf.int64) < len(table), known, tf.ones_like(known))
    return inputs, targets, factor * tf.cast(weights[0], tf.float32) if weights else factor


def validation_batches(data: Any, backend: Backend, *, batch: int) -> Iterable[Batch]:
    """Return this replica's part of validation data: arrays, an ArraySource, or global batches of any kind."""
    if is_stream(data):
        return StreamEvaluation(data, index=backend.process, size=backend.processes)
    if isinstance(data, tf.data.Dataset):
        _first(data)
        return evaluation_of_dataset(data, index=backend.process, size=backend.processes)
    source = data if isinstance(data, ArraySource) else ArraySource(data, "validation data")
    return SourceEvaluation(source, batch=batch, index=backend.process, size=backend.processes)


def _first(dataset: tf.data.Dataset) -> tuple[Any, ...]:
    for elements in dataset.take(1):
        if not isinstance(elements, tuple) or len(elements) not in (2, 3):
            raise DataError("The dataset must give (inputs, targets) or (inputs, targets, sample_weight).")
        if any(tensor.shape.rank == 0 for tensor in tf.nest.flatten(elements)):
            raise DataError("The dataset is not batched: pass fit(…, batch=N), the samples per step over all ranks.")
        return elements
    raise DataError("The dataset is empty.")


def _check_same_order(first: tuple[Any, ...], backend: Backend, cure: str) -> None:
    """Refuse data whose first batch differs by rank: each rank would cut its part out of another batch."""
    digest = hashlib.sha256()
    for tensor in tf.nest.flatten(first):
        digest.update(tf.io.serialize_tensor(tensor).numpy())
    digests = backend.gather_bytes(digest.digest(), timeout=ORDER_TIMEOUT_S)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise DataError(
            f"Rank {others[0]} reads the dataset in another order than rank 0, so samples would be lost and repeated. "
            f"{cure}, or call hvdtrain.init() before the dataset is made."
        )
