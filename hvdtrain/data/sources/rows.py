"""Sources of rows that a Python object of another library returns by number."""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.registry import suggestion
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing
from hvdtrain.data.source import Source, input_shape
from hvdtrain.data.sources.decoding import to_unit
from hvdtrain.data.sources.held_out import check_range
from hvdtrain.data.splits import DataSplits
from hvdtrain.data.subset import hold_out

Row = Mapping[str, Any]


class RowSource:
    """A source whose samples are columns of rows; see `Source`.

    Rows are fetched in Python, one call at a time; `--cache` keeps decoded ones.

    Args:
        read: returns the rows of some numbers, each with a value or array per column.
        size: number of rows.
        inputs: names of the input columns; several make a dict.
        target: name of the target column.
        name: its name in messages.
        classes: number of classes, if the target is a label.
        version: identifies the contents of the rows.

    Raises:
        ConfigError: no such column.
        DataError: no rows, or columns that cannot be tensors.
    """

    heavy = True

    def __init__(
        self,
        read: Callable[[Sequence[int]], Sequence[Row]],
        size: int,
        *,
        inputs: Sequence[str],
        target: str,
        name: str,
        classes: int | None = None,
        version: str = "",
    ) -> None:
        if not size:
            raise DataError(f"{name} holds no samples.")
        self.name = name
        self.size = size
        self._read = read
        self._classes = classes
        self._version = version
        self._columns = (inputs[0] if len(inputs) == 1 else {column: column for column in inputs}, target)
        first = read([0])[0]
        check_columns(name, [*inputs, target], first)
        self.spec = tf.nest.map_structure(lambda column: self._spec(column, first[column]), self._columns)
        self.finite = not any(spec.dtype.is_floating for spec in tf.nest.flatten(self.spec))

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        """See `Source`."""
        specs = tf.nest.flatten(self.spec)
        parts = tf.numpy_function(self._arrays, [numbers], [spec.dtype for spec in specs])
        for part, spec in zip(parts, specs, strict=True):
            part.set_shape([*numbers.shape, *spec.shape])
        return tuple(tf.nest.pack_sequence_as(self.spec, parts))

    def describe(self, number: int) -> str:
        """See `Source`."""
        return f"{self.name}, row {number}"

    def fingerprint(self) -> bytes:
        """Return a hash of name, version, columns, number and shapes of samples; rows are not read."""
        facts = (self.name, self._version, self._columns, self._classes, self.size, self.spec)
        return hashlib.sha256(repr(facts).encode()).digest()

    def _spec(self, column: str, value: Any) -> tf.TensorSpec:
        array = as_array(value)
        if array.dtype.kind == "O":
            raise DataError(f"{self.describe(0)}: the column {column!r} is no tensor, but {type(value).__name__}.")
        return tf.TensorSpec(array.shape, tf.string if array.dtype.kind in "SU" else array.dtype)

    def _arrays(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return one array [n, …] per column, in the order of tf.nest.flatten."""
        rows = self._read([int(number) for number in numbers])
        columns = zip(tf.nest.flatten(self._columns), tf.nest.flatten(self.spec), strict=True)
        arrays = [
            np.stack([self._like(spec, row[column], column, n) for row, n in zip(rows, numbers, strict=True)])
            for column, spec in columns
        ]
        if self._classes is not None:
            check_range(arrays[-1], self._classes, lambda place: self.describe(int(numbers[place])))
        return arrays

    def _like(self, spec: tf.TensorSpec, value: Any, column: str, number: int) -> np.ndarray:
        array = as_array(value)
        if array.dtype.kind == "O":
            raise DataError(f"{self.describe(number)}: the column {column!r} is no tensor, but {type(value).__name__}.")
        if array.shape != tuple(spec.shape):
            raise DataError(
                f"{self.describe(number)}: the column {column!r} is {list(array.shape)} in size, and "
                f"{list(spec.shape)} in the first row: all rows must be alike."
            )
        # As objects, since an array of str would pad or cut texts to one length.
        return array.astype(object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype)


def check_columns(name: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """Refuse columns that rows do not have.

    Raises:
        ConfigError: names the first such column.
    """
    there = dict.fromkeys(known, "")
    for column in wanted:
        if column not in there:
            raise ConfigError(f"{name} has no column {column!r}.{suggestion(column, there)}")


def as_array(value: Any) -> np.ndarray:
    """Convert to an array; a grey uint8 image [height, width] gets a channel dim, a list of str becomes objects."""
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(isinstance(entry, str | bytes) for entry in array.flat):
        array = (
            array.astype(np.str_) if any(isinstance(entry, str) for entry in array.flat) else array.astype(np.bytes_)
        )
    return array[..., np.newaxis] if array.dtype == np.uint8 and array.ndim == 2 else array


def split_for_validation(splits: Collection[str]) -> str:
    """Return the name of the validation split among `splits`; "" if there is none."""
    return next((name for name in ("validation", "test") if name in splits), "")


def row_splits(
    train: RowSource,
    held: RowSource | None,
    *,
    validation: int,
    classes: int | None,
    class_names: Sequence[str] | None = None,
) -> DataSplits:
    """Return training and validation samples of rows.

    Args:
        train: the training rows.
        held: the validation rows; None if there are none.
        validation: rows to hold out if there are none; 0: one in ten.
        classes: number of classes, if the target is a label.
        class_names: their names, if the data set has any.

    Raises:
        ConfigError: both `validation` and `held`.
        DataError: training and validation rows of different shapes.
    """
    if held is not None and validation:
        raise ConfigError(f"{held.name} is there for validation: leave out --data-args validation.")
    if held is not None and held.spec != train.spec:
        raise DataError(f"{train.name} has samples {train.spec}, {held.name} has {held.spec}: both must be alike.")
    parts: tuple[Source, Source] = (train, held) if held else hold_out(train, validation)
    inputs = train.spec[0]
    pixels = isinstance(inputs, tf.TensorSpec) and inputs.dtype == tf.uint8 and inputs.shape.rank == 3
    names = tuple(class_names) if class_names is not None and len(class_names) == classes else None
    shape = input_shape(train)
    return DataSplits(
        parts[0],
        parts[1],
        shape,
        classes,
        finish=to_unit if pixels else None,
        preprocessing=Preprocessing(names, image=ImageInputs(*shape) if pixels else None),
        held_out=held is None,
    )
