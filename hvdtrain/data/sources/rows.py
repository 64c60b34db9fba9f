"""Rows that a Python object of another library returns by number: data sets of `tensorflow-datasets` and `datasets`.

The training split is `train`, the validation split `validation` or else `test`; without either, training rows are held
out. Images are decoded, and must share one size. tensorflow-datasets prepares its data sets as `array_record` files,
which allow random access; do so once before training, since at its start every rank would:

    python -c "import tensorflow_datasets as t; t.builder('mnist', file_format='array_record').download_and_prepare()"
"""

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.compat import fingerprint_of
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.config.registry import optional_package, suggestion
from hvdtrain.data.arrays import check_range, given_or_held_out
from hvdtrain.data.files import find_data
from hvdtrain.data.source import DataSplits, gathered_in_python
from hvdtrain.data.sources.class_folders import HELD
from hvdtrain.data.sources.images import image_splits

Row = Mapping[str, Any]


class RowSource:
    """A source whose samples are columns of rows.

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
        self.classes = classes
        self._version = version
        self._columns = (inputs[0] if len(inputs) == 1 else {column: column for column in inputs}, target)
        first = read([0])[0]
        check_columns(name, [*inputs, target], first)
        arrays = tf.nest.map_structure(lambda column: self._array(first[column], column, 0), self._columns)
        self.spec = tf.nest.map_structure(
            lambda array: tf.TensorSpec(array.shape, tf.string if array.dtype.kind in "SU" else array.dtype), arrays
        )
        self.finite = not any(spec.dtype.is_floating for spec in tf.nest.flatten(self.spec))

    def gather(self, numbers: tf.Tensor) -> tuple[Any, ...]:
        return gathered_in_python(self._arrays, numbers, self.spec)

    def describe(self, number: int) -> str:
        return f"{self.name}, row {number}"

    def fingerprint(self) -> bytes:
        """Return a hash of name, version, columns, number and shapes of samples; rows are not read."""
        facts = (self.name, self._version, self._columns, self.classes, self.size, self.spec)
        return hashlib.sha256(repr(facts).encode()).digest()

    def _arrays(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return one array [n, …] per column, in the order of tf.nest.flatten."""
        rows = self._read(numbers.tolist())
        columns = zip(tf.nest.flatten(self._columns), tf.nest.flatten(self.spec), strict=True)
        arrays = [
            np.stack([self._like(spec, row[column], column, n) for row, n in zip(rows, numbers, strict=True)])
            for column, spec in columns
        ]
        if self.classes is not None:
            check_range(arrays[-1], self.classes, lambda place: self.describe(numbers[place]))
        return arrays

    def _like(self, spec: tf.TensorSpec, value: Any, column: str, number: int) -> np.ndarray:
        array = self._array(value, column, number)
        if array.shape != tuple(spec.shape):
            raise DataError(
                f"{self.describe(number)}: the column {column!r} is {list(array.shape)} in size, and "
                f"{list(spec.shape)} in the first row: all rows must be alike."
            )
        # As objects, since an array of str would pad or cut texts to one length.
        return array.astype(object if spec.dtype == tf.string else spec.dtype.as_numpy_dtype)

    def _array(self, value: Any, column: str, number: int) -> np.ndarray:
        """Convert to an array; a grey uint8 image [height, width] gets a channel dim."""
        array = np.asarray(value)
        if array.dtype.kind == "O" and all(isinstance(entry, str | bytes) for entry in array.flat):
            array = array.astype(np.str_ if any(isinstance(entry, str) for entry in array.flat) else np.bytes_)
        if array.dtype.kind == "O":
            raise DataError(
                f"{self.describe(number)}: the column {column!r} is not a tensor, but {type(value).__name__}."
            )
        return array[..., np.newaxis] if array.dtype == np.uint8 and array.ndim == 2 else array


def check_columns(name: str, wanted: Iterable[str], known: Iterable[str]) -> None:
    """Refuse columns that rows do not have.

    Raises:
        ConfigError: names the first such column.
    """
    there = dict.fromkeys(known, "")
    for column in wanted:
        if column not in there:
            raise ConfigError(f"{name} has no column {column!r}.{suggestion(column, there)}")


def _splits(
    source: Callable[[str], RowSource], train: str, held: str, known: Collection[str], *, validation: int, label: Any
) -> DataSplits:
    """Return the rows of the splits `train` and `held`, by default `validation` or `test`, or else hold some out."""
    chosen = held or next((name for name in HELD if name in known), "")
    rows = source(train)
    parts = given_or_held_out(rows, source(chosen) if chosen else None, validation)
    names = getattr(label, "names", None)
    names = tuple(names) if names is not None and len(names) == rows.classes else None
    return image_splits(*parts, classes=rows.classes, names=names, held_out=not chosen)


def load_tfds(
    *,
    name: str = "",
    path: str = "",
    inputs: str = "",
    target: str = "",
    train_split: str = "train",
    validation_split: str = "",
    validation: int = 0,
    classes: int = 0,
) -> DataSplits:
    """Load the rows of a prepared data set of `tensorflow-datasets`.

    Args:
        name: its name, optionally with configuration and version: `mnist`, `NAME/CONFIGURATION:1.0.0`.
        path: the folder it was prepared in (data_dir); "": the default of tensorflow-datasets.
        inputs: the input column, or several separated by commas, which make a dict; "": as the data set declares.
        target: the target column; "": as the data set declares.
        train_split: the training split, or a slice of one: `train[:80%]`.
        validation_split: the validation split, likewise; "": `validation`, or else `test`.
        validation: rows to hold out if there is no such split; 0: one in ten.
        classes: number of classes; 0: as the data set declares.

    Raises:
        ConfigError: arguments that do not fit, or a package is missing.
        DataError: the data set is not prepared, or cannot be used.
    """
    package = optional_package("tensorflow_datasets", "tfds", "--data tfds")
    optional_package("array_record", "tfds", "--data tfds")
    if not name:
        raise ConfigError("tfds needs --data-args name NAME, as in name mnist.")
    folder = str(find_data(path)) if path else None

    @functools.cache
    def rows_of(split: str) -> Any:
        try:
            return package.data_source(name, split=split, data_dir=folder, download=False)
        except (OSError, ValueError, AssertionError, NotImplementedError) as error:
            raise DataError(
                f"{name} ({split}) cannot be read by number: {str(error).strip().splitlines()[0]} It is prepared by "
                f"tensorflow_datasets.builder({name!r}, file_format='array_record').download_and_prepare()."
            ) from None

    info = rows_of(train_split).dataset_info
    declared = list(info.supervised_keys or ())
    if not (inputs and target) and [*map(type, declared)] != [str, str]:
        raise ConfigError(
            f"tfds needs --data-args inputs COLUMN target COLUMN. {name} has: {', '.join(info.features)}."
        )
    columns, target = inputs.split(",") if inputs else [declared[0]], target or declared[1]
    # A FeaturesDict has no get().
    label = info.features[target] if target in info.features else None  # noqa: SIM401

    def source(split: str) -> RowSource:
        rows = rows_of(split)
        return RowSource(
            lambda numbers: list(rows.__getitems__(list(numbers))),
            len(rows),
            inputs=columns,
            target=target,
            name=f"{info.full_name} ({split})",
            classes=classes or getattr(label, "num_classes", None),
            version=info.file_format.value if info.file_format else "",
        )

    return _splits(source, train_split, validation_split, info.splits, validation=validation, label=label)


def load_hugging_face(
    *,
    path: str = "",
    name: str = "",
    configuration: str = "",
    inputs: str = "",
    target: str = "",
    train_split: str = "train",
    validation_split: str = "",
    validation: int = 0,
    classes: int = 0,
) -> DataSplits:
    """Load the rows of a data set of Hugging Face's `datasets`.

    Args:
        path: a folder written by `save_to_disk`, in place of `name`.
        name: a data set of the hub, `owner/name`, downloaded into Hugging Face's cache if it is not there.
        configuration: its configuration.
        inputs: the input column, or several separated by commas, which make a dict.
        target: the target column.
        train_split: the training split.
        validation_split: the validation split; "": `validation`, or else `test`.
        validation: rows to hold out if there is no such split; 0: one in ten.
        classes: number of classes; 0: as the data set declares.

    Raises:
        ConfigError: arguments that do not fit, or the package `datasets` is missing.
        DataError: the data set does not exist, or cannot be used.
    """
    package = optional_package("datasets", "hf", "--data hf")
    if bool(path) == bool(name):
        raise ConfigError("hf needs --data-args path FOLDER (of save_to_disk), or name OWNER/NAME: one of both.")
    try:
        opened = (
            package.load_from_disk(str(find_data(path))) if path else package.load_dataset(name, configuration or None)
        )
    except DataError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(f"{name or path} cannot be opened by datasets: {error}") from None
    # A single data set is the training split.
    splits = opened if isinstance(opened, Mapping) else {"train": opened}
    if not splits:
        raise DataError(f"{name or path} holds no splits.")
    for split in (train_split, validation_split):
        if split and split not in splits:
            raise ConfigError(f"{name or path} has no split {split!r}. It has: {', '.join(splits)}.")
    columns = splits[train_split].column_names
    if not (inputs and target):
        raise ConfigError(f"hf needs --data-args inputs COLUMN target COLUMN. There are: {', '.join(columns)}.")
    label = splits[train_split].features.get(target)

    def source(split: str) -> RowSource:
        dataset, wanted, title = splits[split], inputs.split(","), f"{name or path} ({split})"
        check_columns(title, [*wanted, target], dataset.column_names)
        # Do not read other columns, nor decode images in them.
        arrays = dataset.select_columns([*wanted, target]).with_format("numpy")

        def read(numbers: Sequence[int]) -> list[Row]:
            block = arrays[list(numbers)]
            return [{column: values[place] for column, values in block.items()} for place in range(len(numbers))]

        return RowSource(
            read,
            len(dataset),
            inputs=wanted,
            target=target,
            name=title,
            classes=classes or getattr(label, "num_classes", None),
            version=fingerprint_of(dataset),
        )

    return _splits(source, train_split, validation_split, splits, validation=validation, label=label)
