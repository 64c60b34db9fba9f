"""A user's own data, returned by a function named MODULE:FUNCTION."""

import inspect
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.user_code import arguments_for, load_function
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.sources.batches_in_memory import gives_batches, in_memory
from hvdtrain.data.splits import DataSplits
from hvdtrain.data.streams.stream_source import StreamSource
from hvdtrain.runtime.warning import warn_on_first

OPTION = "--data"


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
    if not (_is_sequence(returned, 2) and all(_is_sequence(part, 2, 3) or gives_batches(part) for part in returned)):
        raise DataError(
            f"{OPTION} {name} must return (train, validation), each (inputs, targets) or (inputs, targets, "
            "sample_weight) of arrays, or a tf.data.Dataset, PyDataset or generator of them. "
            f"Received: {_described(returned)}."
        )
    train, validation = (
        _source(part, called, held=held)
        for part, called in zip(returned, (f"{OPTION} {name} (training)", f"{OPTION} {name} (validation)"), strict=True)
    )
    if gives_batches(returned[0]) and train.size is not None:
        warn_on_first(
            f"The {train.size:,} samples of {train.name} were read once and are held in memory: what they draw at "
            "random is the same in every epoch. --augment draws anew."
        )
    return DataSplits(train, validation, sample_shape(train), classes_of([train, validation]))


def _source(part: Any, name: str, *, held: bool) -> Any:
    if not gives_batches(part):
        return ArraySource(tuple(part), name)
    # What a generator object gives cannot be read a second time.
    return in_memory(part, name) if held or inspect.isgenerator(part) else StreamSource(part, name)


def sample_shape(source: Any) -> Any:
    """Return the shape of one input: a tuple, or a nest of them like the inputs."""
    return tf.nest.map_structure(lambda spec: tuple(spec.shape), source.spec[0])


def classes_of(sources: list[Any]) -> int | None:
    """Return the number of classes of integer or one-hot targets; None for others."""
    streamed = [source.classes() for source in sources if isinstance(source, StreamSource)]
    if streamed:
        return streamed[0]  # labels that are not read cannot be counted
    targets = [source.elements[1] for source in sources]
    if any(tf.nest.is_nested(target) for target in targets):
        return None
    arrays = [target.numpy() for target in targets]
    if all(is_one_hot(array) for array in arrays):
        return int(arrays[0].shape[1])
    if not all(np.issubdtype(array.dtype, np.integer) for array in arrays):
        return None
    return max(0, *(int(array.max(initial=0)) for array in arrays)) + 1


def is_one_hot(array: np.ndarray) -> bool:
    """Whether `array` [samples, classes] is one-hot."""
    if array.ndim != 2 or array.shape[1] < 2 or not np.issubdtype(array.dtype, np.number):
        return False
    return bool(((array == 0) | (array == 1)).all() and (array.sum(axis=1) == 1).all())


def _is_sequence(thing: Any, *lengths: int) -> bool:
    return isinstance(thing, tuple | list) and len(thing) in lengths


def _described(thing: Any, depth: int = 2) -> str:
    """Describe `thing` and its contents in a few words."""
    if isinstance(thing, tuple | list):
        kind = type(thing).__name__
        inner = ", ".join(_described(part, depth - 1) for part in thing[:4]) if depth else ""
        return f"{kind} of {len(thing)}" + (f" ({inner}{', …' * (len(thing) > 4)})" if inner else "")
    if hasattr(thing, "shape"):
        return f"{type(thing).__name__} of shape {tuple(thing.shape)}"
    return "None" if thing is None else type(thing).__name__
