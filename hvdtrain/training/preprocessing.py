"""Arrays for a model that preprocesses its samples itself, as KerasHub's tasks do: strings and labels."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import keras

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.streams.python_batches import is_stream
from hvdtrain.training.data_arguments import global_batch
from hvdtrain.training.fit_arguments import BATCH_SIZE, VALIDATION_BATCH, FitArguments


def preprocesses(model: Any, x: Any) -> bool:
    """Return whether `model` has `preprocess_samples` in use, for data `x` that are not batched yet."""
    used = callable(getattr(model, "preprocess_samples", None)) and getattr(model, "preprocessor", None) is not None
    return used and not hasattr(x, "element_spec") and not is_stream(x)


def preprocessed(model: Any, parts: Sequence[Any], batch: int | None) -> Any:
    """Return batches of x, y and sample_weight, of which the last may be missing; batches stay as they are."""
    if not isinstance(parts, tuple):
        return parts
    return PreprocessedBatches(model, (*parts, None, None)[:3], batch or VALIDATION_BATCH)


def preprocessed_arguments(model: Any, arguments: FitArguments, backend: Backend) -> FitArguments:
    """Return the arguments of `fit` with preprocessed batches in place of arrays, in their order."""
    data, validation = arguments.data, arguments.validation
    parts, held_out = (data.x, data.y, data.sample_weight), validation.validation_data
    if validation.validation_split:
        parts, held_out = split_samples(parts, validation.validation_split)
    size = global_batch(data.batch_size, data.batch, backend, BATCH_SIZE)
    held_size = global_batch(validation.validation_batch_size, validation.validation_batch, backend) or size
    batches: dict[str, Any] = {"x": preprocessed(model, parts, size), "y": None, "sample_weight": None}
    held: dict[str, Any] = {"validation_data": preprocessed(model, held_out, held_size), "validation_split": 0.0}
    sizes: dict[str, Any] = {"validation_batch_size": None, "validation_batch": None}
    return replace(
        arguments,
        data=replace(data, **batches, batch_size=None, batch=None, shuffle=False),
        validation=replace(validation, **held, **sizes),
    )


class PreprocessedBatches(keras.utils.PyDataset):
    """Batches of samples in their order, preprocessed by the model, as KerasHub forms them.

    Args:
        model: has `preprocess_samples(x, y, sample_weight)`.
        parts: x, y and sample_weight: lists or arrays, or nests of them by tuple and dict; None where missing.
        batch: samples of a batch.
    """

    def __init__(self, model: Any, parts: tuple[Any, Any, Any], batch: int) -> None:
        super().__init__()
        self._preprocess = model.preprocess_samples
        self._parts = parts
        self._batch = batch
        self._size = _length(parts[0])

    def __len__(self) -> int:
        return math.ceil(self._size / self._batch)

    def __getitem__(self, number: int) -> Any:
        rows = slice(number * self._batch, (number + 1) * self._batch)
        return self._preprocess(*(_sliced(part, rows) for part in self._parts))


def split_samples(parts: tuple[Any, ...], fraction: float) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Split off the last `fraction` of the samples, as Keras does."""
    begin = math.floor(_length(parts[0]) * (1.0 - fraction))
    first, last = slice(0, begin), slice(begin, None)
    return tuple(_sliced(part, first) for part in parts), tuple(_sliced(part, last) for part in parts)


def _length(part: Any) -> int:
    if isinstance(part, tuple | dict):
        return _length(next(iter(part.values() if isinstance(part, dict) else part)))
    return len(part)


def _sliced(part: Any, rows: slice) -> Any:
    """Return rows of lists and arrays; tuples and dicts are structure, as in tf.data."""
    if isinstance(part, tuple):
        return tuple(_sliced(each, rows) for each in part)
    if isinstance(part, dict):
        return {name: _sliced(each, rows) for name, each in part.items()}
    return None if part is None else part[rows]
