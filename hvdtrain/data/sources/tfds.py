"""Data sets of `tensorflow-datasets`, prepared as `array_record` files, which allow random access.

Prepare them once before training; at its start, every rank would do so:

    python -c "import tensorflow_datasets as t; t.builder('mnist', file_format='array_record').download_and_prepare()"

The training split is `train`, the validation split `validation` or else `test`; without either, training rows are held
out.
"""

from collections.abc import Sequence
from typing import Any

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.sources.extras import optional_package
from hvdtrain.data.sources.rows import Row, RowSource, row_splits, split_for_validation
from hvdtrain.data.splits import DataSplits


def load(
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
    """Load the rows of a prepared data set.

    Args:
        name: its name, optionally with configuration and version: `mnist`, `NAME/CONFIGURATION:1.0.0`.
        path: the folder it was prepared in (data_dir); "": the default of tensorflow-datasets.
        inputs: the input column, or several separated by commas, which make a dict; "": as the data set declares.
        target: the target column; "": as the data set declares.
        train_split: the training split, or a slice of one: `train[:80%]`.
        validation_split: the validation split, likewise; "": see above.
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
    train = _rows(package, name, folder, train_split)
    info = train.dataset_info
    chosen = validation_split or split_for_validation(info.splits)
    columns = _columns(name, info, inputs, target)
    known = classes or _classes(info.features, columns[-1])

    def source(rows: Any, split: str) -> RowSource:
        return RowSource(
            _reader(rows),
            len(rows),
            inputs=columns[:-1],
            target=columns[-1],
            name=f"{info.full_name} ({split})",
            classes=known,
            version=info.file_format.value if info.file_format else "",
        )

    held = source(_rows(package, name, folder, chosen), chosen) if chosen else None
    names = getattr(info.features[columns[-1]], "names", None) if columns[-1] in info.features else None
    return row_splits(source(train, train_split), held, validation=validation, classes=known, class_names=names)


def _rows(package: Any, name: str, folder: str | None, split: str) -> Any:
    try:
        return package.data_source(name, split=split, data_dir=folder, download=False)
    except (OSError, ValueError, AssertionError, NotImplementedError) as error:
        raise DataError(
            f"{name} ({split}) cannot be read by number: {str(error).strip().splitlines()[0]} It is prepared by "
            f"tensorflow_datasets.builder({name!r}, file_format='array_record').download_and_prepare()."
        ) from None


def _reader(rows: Any) -> Any:
    def read(numbers: Sequence[int]) -> Sequence[Row]:
        return list(rows.__getitems__(list(numbers)))

    return read


def _classes(features: Any, target: str) -> int | None:
    return getattr(features[target], "num_classes", None) if target in features else None


def _columns(name: str, info: Any, inputs: str, target: str) -> list[str]:
    """Return the names of the input columns and, last, of the target."""
    known = list(info.supervised_keys or ())
    if not (inputs and target) and [*map(type, known)] != [str, str]:
        raise ConfigError(
            f"tfds needs --data-args inputs COLUMN target COLUMN. {name} has: {', '.join(info.features)}."
        )
    return [*(inputs.split(",") if inputs else [known[0]]), target or known[1]]
