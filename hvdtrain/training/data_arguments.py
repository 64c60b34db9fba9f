"""Data arguments of `fit`, `evaluate` and `predict`, under Keras' names."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.streams.python_batches import is_stream


def is_arrays(data: Any) -> bool:
    """Return whether `data` are arrays, as opposed to batches."""
    return not isinstance(data, tf.data.Dataset) and not is_stream(data)


def number_of_samples(data: Any) -> int:
    """Return the samples of arrays."""
    return data.size if isinstance(data, ArraySource) else len(tf.nest.flatten(data)[0])


def combined(x: Any, y: Any = None, sample_weight: Any = None) -> Any:
    """Combine data arguments: batches unchanged, arrays as `(inputs, targets[, sample_weight])`.

    `x` may be inputs, such a tuple, or batches; weights have the shape [samples]. Raises ConfigError for targets or
    weights in addition to batches, which contain them.
    """
    if y is None and sample_weight is None:
        return x[:2] if isinstance(x, tuple) and len(x) == 3 and x[2] is None else x
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
    source = _source(data)
    begin = math.floor(source.size * (1.0 - fraction))
    if begin in (0, source.size):
        raise ConfigError(f"validation_split={fraction} of {source.size} samples leaves one part without any.")
    return source.part(slice(0, begin), "data"), source.part(slice(begin, None), "validation data")


def first_batches(data: Any, steps: int | None, batch: int) -> Any:
    """Return the first `steps` batches of evaluation data (arrays or batches); None: all."""
    if steps is None:
        return data
    if isinstance(data, tf.data.Dataset):
        return data.take(steps)
    if isinstance(data, keras.utils.PyDataset):
        return _FirstBatches(data, steps)
    if is_stream(data):
        return lambda: itertools.islice(iter(data()), steps)
    return _source(data).part(slice(0, steps * batch), "validation data")


class _FirstBatches(keras.utils.PyDataset):
    """The first batches of a PyDataset."""

    def __init__(self, dataset: keras.utils.PyDataset, steps: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._steps = steps

    @property
    def num_batches(self) -> int:
        count = self._dataset.num_batches
        return self._steps if count is None else min(count, self._steps)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


def _source(data: Any) -> ArraySource:
    return data if isinstance(data, ArraySource) else ArraySource(data)
