"""Arguments of `Trainer.fit`, by Keras' names, and the data they specify."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import input_nest
from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData, check_passes
from hvdtrain.data.streams.python_batches import as_function, is_stream
from hvdtrain.runtime.logs import warn_on_first
from hvdtrain.state.scalars import Scalars
from hvdtrain.training.inputs import (
    as_source,
    evaluation_data,
    is_arrays,
    number_of_samples,
    rank_training_data,
    training_data,
    with_class_weights,
)
from hvdtrain.training.plan import Plan

BATCH_SIZE = 32
"""Default samples per rank and step for arrays, as in Keras."""
VALIDATION_BATCH = 256
"""Default samples per evaluation step over all ranks, where none are given for training."""


@dataclass(frozen=True, kw_only=True)
class FitArguments:
    """Arguments of `Trainer.fit`, under its names."""

    x: Any
    y: Any
    sample_weight: Any
    class_weight: Mapping[int, float] | None
    batch_size: int | None
    batch: int | None
    steps_per_epoch: int | None
    shuffle: bool
    shard: str | None
    validation_split: float
    validation_data: Any
    validation_steps: int | None
    validation_batch_size: int | None
    validation_batch: int | None
    validation_freq: int | Sequence[int]
    epochs: int
    initial_epoch: int
    log_every: int
    callbacks: Sequence[Any]
    checkpoint: Checkpoint | str | PathLike[str] | None
    verbose: str | int

    def facts(self) -> dict[str, Any]:
        """Return what ranks must agree on by name, without callbacks and checkpoints."""
        own = {name: value for name, value in vars(self).items() if name not in ("callbacks", "checkpoint", "verbose")}
        return {**own, "validation_freq": str(self.validation_freq)}

    def check(self) -> None:
        """Reject invalid counts, and arguments that exclude one another. Raises ConfigError naming the argument."""
        check_shard(self.shard)
        check_counts({name: getattr(self, name) for name in _COUNTS}, {"initial_epoch": 0})
        freq = self.validation_freq
        if not isinstance(freq, Sequence) and not (isinstance(freq, int | np.integer) and freq >= 1):
            raise ConfigError(
                f"validation_freq is a number of epochs, or a list of those to evaluate after. Received: {freq!r}."
            )
        has_targets = self.y is not None or (isinstance(self.x, tuple) and len(self.x) > 1)
        if has_targets and hasattr(self.validation_data, "shape"):
            raise ConfigError(
                "validation_data has targets where the training has: (inputs, targets[, sample_weight]), or batches of "
                f"them. Received: one array, of shape {tuple(self.validation_data.shape)}."
            )

    def given(self, passes: int = 1) -> Any:
        """Return the training data as one value, for so many passes."""
        return combined(as_function(self.x, self.steps_per_epoch, passes=passes), self.y, self.sample_weight)

    def batch_for(self, data: Any, backend: Backend) -> int | None:
        """Return the samples per step over all ranks; None if the data are batched.

        Of arrays by default as many as `steps_per_epoch` asks for.
        """
        if not is_arrays(data):
            return global_batch(self.batch_size, self.batch, backend)
        if self.steps_per_epoch and self.batch_size is None and self.batch is None:
            return -(-number_of_samples(data) // self.steps_per_epoch)
        return global_batch(self.batch_size, self.batch, backend, BATCH_SIZE)

    def streams(self, backend: Backend, seed: int) -> tuple[TrainingData, Iterable[Batch] | None]:
        """Return this replica's training batches and its validation batches, if any.

        Raises ConfigError for arguments that do not fit the kind of data, and DataError for unusable data.
        """
        data, held_out = self.given(self.epochs - self.initial_epoch), combined(self.validation_data)
        if held_out is None and self.validation_split:
            data, held_out = split_arrays(data, self.validation_split)
        read = training_data if self.shard is None else rank_training_data
        training = read(
            with_class_weights(data, self.class_weight),
            backend,
            batch=self.batch_for(data, backend),
            seed=seed,
            shuffle=bool(self.shuffle),
            steps_per_epoch=self.steps_per_epoch,
        )
        check_passes(training, self.epochs * training.steps_per_epoch)
        if held_out is None:
            return training, None
        batch = global_batch(self.validation_batch_size, self.validation_batch, backend)
        batch = batch or self.batch_for(data, backend) or VALIDATION_BATCH
        return training, evaluation_data(held_out, backend, batch=batch, steps=self.validation_steps, shard=self.shard)

    def plan(self, scalars: Scalars, steps_per_epoch: int) -> Plan:
        """Return the plan of the remaining training in state `scalars`."""
        epochs = 0 if scalars.stopped else max(0, self.epochs - scalars.epoch_of_training)
        steps = max(epochs, epochs * steps_per_epoch - scalars.step_in_epoch)
        freq = self.validation_freq
        return Plan(
            scalars.step + steps,
            log_every=self.log_every,
            validation_freq=int(freq) if isinstance(freq, int | np.integer) else tuple(int(epoch) for epoch in freq),
            epoch_offset=-scalars.epochs_before,
            until_epoch=scalars.epoch + epochs,
        )


def at_most_of_keras(name: str, given: Any, most: int | None) -> Any:
    """Return a number of epochs or steps as `keras.config` limits it, with Keras' warning."""
    if not most or (given and given <= most):
        return given
    warn_on_first(f"Limiting {name} to {most}", stacklevel=3)
    return most


_COUNTS = (
    "batch_size",
    "batch",
    "steps_per_epoch",
    "validation_steps",
    "validation_batch_size",
    "validation_batch",
    "epochs",
    "initial_epoch",
    "log_every",
)


def combined(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Combine data arguments: batches unchanged, arrays as `(inputs, targets[, sample_weight])`.

    `x` may be inputs, such a tuple, or batches; weights have the shape [samples]. Raises ConfigError for targets or
    weights in addition to batches, which contain them.
    """
    if y is None and sample_weight is None:
        while isinstance(x, tuple) and len(x) > 1 and x[-1] is None:
            x = x[:-1]
        return x
    if not is_arrays(x):
        second = "y" if y is not None else "sample_weight"
        raise ConfigError(
            f"A Dataset, a PyDataset or a generator gives (inputs, targets[, sample_weight]): leave out {second}."
        )
    if y is None:
        if not isinstance(x, tuple) or len(x) != 2:
            raise ConfigError("sample_weight needs targets: pass fit(x, y, sample_weight=…).")
        x, y = x
    return (x, y) if sample_weight is None else (x, y, sample_weight)


def inputs_alone(model: Any, x: Any, y: Any = None) -> Any:
    """Return `x` as `(inputs,)` where it is inputs without targets, as Keras takes it; other data unchanged.

    So is a list of arrays, and a tuple of one array for each of several inputs of the model: as `(inputs, targets)` it
    would have too few of them.
    """
    arrays = isinstance(x, list | tuple) and all(hasattr(each, "shape") for each in x)
    if y is not None or not arrays:
        return x
    inputs = tf.nest.flatten(input_nest(model))
    return (x,) if isinstance(x, list) or 1 < len(inputs) == len(x) else x


def check_counts(counts: Mapping[str, Any], least: Mapping[str, int] | None = None) -> None:
    """Reject counts below `least` (default: 1), and a batch given both per rank and over all ranks.

    Raises ConfigError naming the argument.
    """
    for name, count in counts.items():
        smallest = (least or {}).get(name, 1)
        whole = isinstance(count, int | np.integer) and not isinstance(count, bool)
        if count is not None and not (whole and count >= smallest):
            raise ConfigError(f"{name} must be a whole number of at least {smallest}. Received: {count!r}.")
    for prefix in ("", "validation_"):
        per_rank, over_all = counts.get(f"{prefix}batch_size"), counts.get(f"{prefix}batch")
        if per_rank is not None and over_all is not None:
            raise ConfigError(
                f"{prefix}batch_size is per rank, and {prefix}batch over all ranks: give one of them. "
                f"Received: {prefix}batch_size={per_rank}, {prefix}batch={over_all}."
            )


def check_shard(shard: Any) -> None:
    """Reject values of `shard` other than None and "rank". Raises ConfigError with the value."""
    if shard not in (None, "rank"):
        raise ConfigError(
            'shard is None, where every rank is given all samples, or "rank", where each is given its own part. '
            f"Received: {shard!r}."
        )


def global_batch(batch_size: int | None, batch: int | None, backend: Backend, default: int | None = None) -> int | None:
    """Return the samples per step over all ranks; `batch_size` and `default` are per rank."""
    if batch is not None:
        return batch
    size = default if batch_size is None else batch_size
    return None if size is None else size * backend.data_parallel.size


def split_arrays(data: Any, fraction: float) -> tuple[ArraySource, ArraySource]:
    """Split off the last `fraction` of arrays for validation, like Keras.

    Raises ConfigError for other data, a fraction outside (0, 1), or an empty split.
    """
    if not isinstance(fraction, float | int) or not 0 < fraction < 1:
        raise ConfigError(f"validation_split is a fraction between 0 and 1. Received: {fraction!r}.")
    if not is_arrays(data):
        raise ConfigError("validation_split is for arrays: pass validation_data, such as data.take(N) of a Dataset.")
    source = as_source(data)
    begin = math.floor(source.size * (1.0 - fraction))
    if begin in (0, source.size):
        raise ConfigError(f"validation_split={fraction} of {source.size} samples leaves one part without any.")
    return source.part(slice(0, begin), "data"), source.part(slice(begin, None), "validation data")


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
    parts, held_out = (arguments.x, arguments.y, arguments.sample_weight), arguments.validation_data
    if arguments.validation_split:
        parts, held_out = split_samples(parts, arguments.validation_split)
    size = global_batch(arguments.batch_size, arguments.batch, backend, BATCH_SIZE)
    held_size = global_batch(arguments.validation_batch_size, arguments.validation_batch, backend) or size
    return replace(
        arguments,
        x=preprocessed(model, parts, size),
        y=None,
        sample_weight=None,
        batch_size=None,
        batch=None,
        shuffle=False,
        validation_data=preprocessed(model, held_out, held_size),
        validation_split=0.0,
        validation_batch_size=None,
        validation_batch=None,
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
