"""A user's own data, returned by a function named MODULE:FUNCTION: arrays, or batches that are streamed or held."""

import hashlib
import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError, opt
from hvdtrain.config.user_code import arguments_for, load_function
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.source import DataSplits, input_shape
from hvdtrain.data.streams.cut import standard
from hvdtrain.data.streams.given import content_of
from hvdtrain.data.streams.python_batches import each_once, is_stream, opened
from hvdtrain.data.streams.sharded_dataset import batch_size_of
from hvdtrain.runtime.logs import warn_on_first

OPTION = "--data"
CHUNK = 256
"""Unbatched samples of a Dataset read at a time."""


def user_splits(config: DataConfig, seed: int) -> DataSplits:
    """Call the function `config.data` and return its data.

    It returns `(train, validation)`, each `(inputs, targets)` or `(inputs, targets, sample_weight)` of arrays or nests
    of arrays, or a tf.data.Dataset, PyDataset or generator function of such tuples, which is streamed, or read once
    into memory with `--cache memory`; or it returns a `DataSplits`. It is called on every rank with
    `config.data_args`, and with `seed` if it has a parameter of that name. Python's, NumPy's and TensorFlow's
    generators are seeded, so that they draw the same on all ranks. Its attribute `classes`, if any, holds the names of
    the labels 0, 1, ….

    Raises:
        ConfigError: no such function, one that does not accept the arguments, or another number of names than labels.
        DataError: it returns something else, or data that cannot be used.
    """
    function = load_function(OPTION, config.data)
    arguments = arguments_for(
        OPTION, name=config.data, function=function, offered={"seed": seed}, given=config.data_args
    )
    keras.utils.set_random_seed(seed)
    splits = splits_of(function(**arguments), config.data, held=config.cache == "memory")
    names = getattr(function, "__dict__", {}).get("classes")
    return splits if names is None else _with_names(splits, names, config.data)


def _with_names(splits: DataSplits, names: Any, name: str) -> DataSplits:
    """Name the labels of `splits`; there may be more names than labels that occur."""
    texts = tuple(names) if isinstance(names, tuple | list) else ()
    counted = splits.classes if splits.train.size is not None else len(texts)
    fits = counted is not None and len(texts) >= counted
    if not fits or not all(isinstance(text, str) for text in texts) or len(set(texts)) < len(texts):
        raise ConfigError(
            f"{OPTION} {name}: its attribute classes must be a list of different names, one for each of the "
            f"{splits.classes or 'integer'} labels. Received: {names!r}."
        )
    return replace(splits, classes=len(texts), preprocessing=replace(splits.preprocessing, class_names=texts))


def splits_of(returned: Any, name: str, *, held: bool = False) -> DataSplits:
    """Convert the return value of a user's function `name` to `DataSplits`.

    Args:
        returned: the value.
        name: the function's.
        held: whether batches are read once into memory; else they are streamed, but for a generator object.

    Raises:
        DataError: it is something else, or training and validation samples differ in shape.
    """
    if isinstance(returned, DataSplits):
        return returned

    def is_tuple(thing: Any, *lengths: int) -> bool:
        return isinstance(thing, tuple | list) and len(thing) in lengths

    def source(part: Any, name: str) -> Any:
        if not gives_batches(part):
            return ArraySource(tuple(part), name)
        # The batches of a generator object cannot be read a second time.
        return in_memory(part, name) if held or inspect.isgenerator(part) else StreamSource(part, name)

    if not (is_tuple(returned, 2) and all(is_tuple(part, 2, 3) or gives_batches(part) for part in returned)):
        raise DataError(
            f"{OPTION} {name} must return (train, validation), each (inputs, targets) or (inputs, targets, "
            "sample_weight) of arrays, or a tf.data.Dataset, PyDataset or generator of them. "
            f"Received: {_described(returned)}."
        )
    train = source(returned[0], f"{OPTION} {name} (training)")
    validation = source(returned[1], f"{OPTION} {name} (validation)")
    if gives_batches(returned[0]) and train.size is not None:
        warn_on_first(
            f"The {train.size:,} samples of {train.name} were read once and are held in memory: what they draw at "
            "random is the same in every epoch. --augment draws anew."
        )
    return DataSplits(train, validation, input_shape(train), classes_of([train, validation]))


def classes_of(sources: list[Any]) -> int | None:
    """Return the number of classes of integer or one-hot targets; None for others."""
    streamed = [source.classes() for source in sources if isinstance(source, StreamSource)]
    if streamed:
        return streamed[0]  # labels that are not read cannot be counted
    targets = [source.elements[1] for source in sources]
    if any(tf.nest.is_nested(target) for target in targets):
        return None
    arrays = [np.asarray(target) for target in targets]
    if all(is_one_hot(array) for array in arrays):
        return int(arrays[0].shape[1])
    if not all(np.issubdtype(array.dtype, np.integer) for array in arrays):
        return None
    return max(0, *(int(array.max(initial=0)) for array in arrays)) + 1


def is_one_hot(array: np.ndarray) -> bool:
    """Return whether `array` [samples, classes] is one-hot."""
    if array.ndim != 2 or array.shape[1] < 2 or not np.issubdtype(array.dtype, np.number):
        return False
    return bool(((array == 0) | (array == 1)).all() and (array.sum(axis=1) == 1).all())


def _described(thing: Any, depth: int = 2) -> str:
    """Describe `thing` and its contents in a few words."""
    if isinstance(thing, tuple | list):
        kind = type(thing).__name__
        inner = ", ".join(_described(part, depth - 1) for part in thing[:4]) if depth else ""
        return f"{kind} of {len(thing)}" + (f" ({inner}{', …' * (len(thing) > 4)})" if inner else "")
    if hasattr(thing, "shape"):
        return f"{type(thing).__name__} of shape {tuple(thing.shape)}"
    return "None" if thing is None else type(thing).__name__


class StreamSource:
    """A tf.data.Dataset, PyDataset or generator function of `(inputs, targets[, sample_weight])`.

    It has the name, spec and fingerprint of a `Source`, but neither a size nor `gather`.

    Args:
        data: a Dataset of samples or of global batches, or Python's global batches.
        name: its name in messages.

    Raises:
        DataError: it is empty, or gives something else.
    """

    finite = False
    heavy = True
    size = None

    def __init__(self, data: Any, name: str) -> None:
        self.data = data
        self.name = name
        self.batched = not isinstance(data, tf.data.Dataset) or _is_batched(data.element_spec)
        if isinstance(data, tf.data.Dataset):
            first = next(iter((data if self.batched else data.batch(1)).take(1).as_numpy_iterator()), None)
            if first is None:
                raise DataError(f"{name} holds no samples.")
            self._first = standard(first, name)
        else:
            self._first = opened(data)[0]
        self.spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape[1:], tf.as_dtype(array.dtype)), self._first
        )
        self.rows = len(tf.nest.flatten(self._first)[0])
        """Samples of the first batch."""

    def classes(self) -> int | None:
        """Return the number of classes where the first batch shows it: by one-hot targets."""
        targets = self._first[1]
        return int(targets.shape[1]) if not tf.nest.is_nested(targets) and is_one_hot(targets) else None

    def fingerprint(self) -> bytes:
        """Return a hash [32 bytes] of the first batch: no more is known."""
        return hashlib.sha256(content_of(tuple(map(np.asarray, tf.nest.flatten(self._first)))).encode()).digest()

    def describe(self, number: int) -> str:
        return f"sample {number} of {self.name}"

    def batches(self, batch: int, option: str) -> Any:
        """Return the data in global batches of `batch` samples.

        Raises:
            ConfigError: Python's batches of another size.
        """
        if isinstance(self.data, tf.data.Dataset):
            if not self.batched:
                return self.data.batch(batch)
            return self.data if batch_size_of(self.data) == batch else self.data.rebatch(batch)
        if self.rows != batch:
            called = partial(opt, option, argument=option != "eval_batch")
            raise ConfigError(
                f"The batches of {self.name} are global batches, of {self.rows} samples. Received: {called()} {batch}. "
                f"Use {called(self.rows)}, or --cache memory to read them once into memory."
            )
        return self.data


def gives_batches(data: Any) -> bool:
    """Return whether `data` is a Dataset, PyDataset, generator or generator function, not arrays."""
    return isinstance(data, tf.data.Dataset) or inspect.isgenerator(data) or is_stream(data)


def in_memory(data: Any, name: str) -> ArraySource:
    """Read all of `data` and return its samples, in order.

    A Dataset may also be unbatched, which shows by a scalar tensor or by different first dims. Random transformations
    are drawn once, here.

    Args:
        data: batches `(inputs, targets[, sample_weight])`, of any sizes; see `gives_batches`.
        name: the name of the data in messages.

    Raises:
        DataError: the data never end, are empty, have another structure, or samples of different shapes or dtypes.
    """
    if (isinstance(data, tf.data.Dataset) and data.cardinality() == tf.data.INFINITE_CARDINALITY) or (
        isinstance(data, keras.utils.PyDataset) and data.num_batches is None
    ):
        raise DataError(
            f"{name} never ends and cannot be held: use take(), or leave out --cache and pass --steps-per-epoch N."
        )
    if isinstance(data, tf.data.Dataset):
        data = (data if _is_batched(data.element_spec) else data.batch(CHUNK)).as_numpy_iterator()
    elif not inspect.isgenerator(data):
        data = each_once(data)
    batches = [standard(batch, name) for batch in data]
    if not batches:
        raise DataError(f"{name} holds no samples.")
    if not isinstance(batches[0], tuple):
        raise DataError(f"{name} must give batches (inputs, targets) or (inputs, targets, sample_weight).")
    kinds = [str(tf.nest.map_structure(lambda a: f"{a.dtype}{list(a.shape[1:])}", batch)) for batch in batches]
    other = next((number for number, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        raise DataError(f"Batch {other} of {name} holds {kinds[other]}, and the first one {kinds[0]}.")
    return ArraySource(tf.nest.map_structure(lambda *parts: np.concatenate(parts), *batches), name)


def _is_batched(spec: Any) -> bool:
    """Return whether elements are batches: a Dataset of samples shows by a scalar, or by different first dims."""
    shapes = [part.shape for part in tf.nest.flatten(spec)]
    if any(shape.rank == 0 for shape in shapes):
        return False
    return len({shape[0] for shape in shapes if shape.rank is not None}) <= 1
